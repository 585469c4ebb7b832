{{/* What the schema cannot say because it concerns several values. Every message says what to change. */}}
{{- define "carnelian.check" -}}
{{- if and (gt (int .Values.gpu.count) 0) (ne .Values.runtime "native") -}}
{{- fail (printf "gpu.count is %v, but `runtime: %s` has no GPU backends; set runtime: native" .Values.gpu.count .Values.runtime) -}}
{{- end -}}
{{- if and (eq .Values.modelRepository.source "pvc") (not .Values.modelRepository.pvc.claimName) -}}
{{- fail "modelRepository.source is pvc, but modelRepository.pvc.claimName is empty; name the claim" -}}
{{- end -}}
{{- if and .Values.model.load (not (has .Values.model.name .Values.model.load)) -}}
{{- fail (printf "model.name is %s, but model.load does not have it, so the pods would never be ready; add it" .Values.model.name) -}}
{{- end -}}
{{- if and (eq (toString .Values.updateStrategy.maxSurge) "0") (eq (toString .Values.updateStrategy.maxUnavailable) "0") -}}
{{- fail "updateStrategy.maxSurge and updateStrategy.maxUnavailable are both 0, so no update could begin; raise one" -}}
{{- end -}}
{{- if le (int .Values.progressDeadlineSeconds) (int .Values.probes.startup.timeoutSeconds) -}}
{{- fail (printf "progressDeadlineSeconds is %v, but a pod may take probes.startup.timeoutSeconds, %v, to start; raise it" .Values.progressDeadlineSeconds .Values.probes.startup.timeoutSeconds) -}}
{{- end -}}
{{- end -}}
