{{/* PromQL. Every series of this release carries namespace, pod and release: the monitors see to that. */}}

{{- define "carnelian.series" -}}
namespace="{{ .Release.Namespace }}",release="{{ include "carnelian.fullname" . }}"
{{- end -}}

{{/* The stages; all other models are ensembles, what clients call. */}}
{{- define "carnelian.stages" -}}
model=~"audio_decode|.+_(features|acoustic|ctc)"
{{- end -}}

{{- define "carnelian.ensembles" -}}
model!~"audio_decode|.+_(features|acoustic|ctc)"
{{- end -}}

{{/* Seconds of audio that are waiting or being worked on: requests in progress (their time per second, by Little's law) times
the audio of a request. Takes (dict "by" "ensembles" "clips" "window"), the middle two being selectors. */}}
{{- define "carnelian.audioInProgress" -}}
sum by ({{ .by }}) (rate(nv_inference_request_duration_us{{ "{" }}{{ .ensembles }}{{ "}" }}[{{ .window }}])) / 1e6
* sum by ({{ .by }}) (rate(carnelian_audio_seconds_total{{ "{" }}{{ .clips }}{{ "}" }}[{{ .window }}]))
/ clamp_min(sum by ({{ .by }}) (rate(nv_inference_request_success{{ "{" }}{{ .ensembles }}{{ "}" }}[{{ .window }}])), 1e-6)
{{- end -}}
