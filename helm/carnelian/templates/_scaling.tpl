{{/* How fast pods come and go, of an HPA and of the one that KEDA makes; takes the values of `autoscaling`. */}}
{{- define "carnelian.scalingBehavior" -}}
scaleUp:
  policies:
    - {type: Pods, value: {{ .scaleUp.pods }}, periodSeconds: {{ .scaleUp.periodSeconds }}}
    - {type: Percent, value: 100, periodSeconds: {{ .scaleUp.periodSeconds }}}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDown.stabilizationSeconds }}
  policies:
    - {type: Pods, value: {{ .scaleDown.pods }}, periodSeconds: {{ .scaleDown.periodSeconds }}}
{{- end -}}
