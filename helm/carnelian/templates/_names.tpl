{{/* Names and labels. Names have 46 characters at most: a Job's suffix of 13 and the index of its pod fit into the 63 that
Kubernetes allows. Longer ones are refused, not cut: two releases could end up with one name. */}}

{{- define "carnelian.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{- define "carnelian.fullname" -}}
{{- $name := include "carnelian.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}

{{/* What never changes in the life of a release: a Deployment's selector cannot be changed. */}}
{{- define "carnelian.selector" -}}
app.kubernetes.io/name: {{ include "carnelian.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end -}}

{{/* The whole `metadata` of an object. Takes (dict "of" $ "component" "server") with, if need be, "labels", "annotations", and a
"suffix" of the release's name or another "name". A key counts where it is first: in the chart's own labels, commonLabels, "labels";
in "annotations", commonAnnotations. */}}
{{- define "carnelian.metadata" -}}
{{- $root := .of -}}
{{- $standard := dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" (include "carnelian.name" $root)
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/part-of" "carnelian"
  "app.kubernetes.io/managed-by" $root.Release.Service -}}
name: {{ default (list (include "carnelian.fullname" $root) .suffix | compact | join "-") .name | toYaml }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- merge $standard (default dict $root.Values.commonLabels) (default dict .labels) | toYaml | nindent 2 }}
{{- with merge (dict) (default dict .annotations) (default dict $root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "carnelian.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "carnelian.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.image" -}}
{{- $suffix := ternary "cpu" "native" (eq .Values.runtime "wheel") -}}
{{- include "carnelian.reference" (dict "image" .Values.image "tag" (printf "%s-%s" .Chart.AppVersion $suffix)) -}}
{{- end -}}

{{/* repository@digest, else repository:tag; takes (dict "image" values "tag" default). */}}
{{- define "carnelian.reference" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What every pod has; takes (list $ values), the latter being what the user says of this one. */}}
{{- define "carnelian.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include "carnelian.serviceAccountName" $root | quote }}
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index . 1 }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the server and the Jobs are told alike. */}}
{{- define "carnelian.commonEnv" -}}
# Nothing is written to a home folder: the root file system is read-only.
- name: HOME
  value: /tmp
# PyPI's ONNX Runtime reports its use to Microsoft otherwise.
- name: ORT_DISABLE_TELEMETRY
  value: "1"
{{- end -}}

{{/* The `metadata` of a Job's pods; takes (list $ values labels). */}}
{{- define "carnelian.jobPodMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- merge (dict) (index . 2) (include "carnelian.selector" $root | fromYaml) (default dict $root.Values.commonLabels) | toYaml | nindent 2 }}
{{- with merge (dict) (default dict (index . 1).podAnnotations) (default dict $root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
