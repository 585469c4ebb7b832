{{/* The serving container's command line. Both runtimes end in the same options of tritonserver. */}}

{{- define "carnelian.command" -}}
{{- if eq .Values.runtime "wheel" -}}
- carnelian-serve
{{- else -}}
- tritonserver
{{- end -}}
{{- end -}}

{{- define "carnelian.args" -}}
{{- if eq .Values.runtime "wheel" -}}
- --repository={{ include "carnelian.repository" . }}
- --host={{ .Values.server.host }}
- --http-port=8000
- --grpc-port=8001
- --metrics-port=8002
- --log-level={{ .Values.server.logLevel }}
- --exit-timeout={{ .Values.drain.timeoutSeconds }}
- --start-timeout={{ .Values.probes.startup.timeoutSeconds }}
{{- with .Values.server.threads }}
- --threads={{ . }}
{{- end }}
{{- range .Values.model.load }}
- --model={{ . }}
{{- end }}
- --
{{- else -}}
- --model-repository={{ include "carnelian.repository" . }}
- --http-address={{ .Values.server.host }}
- --grpc-address={{ .Values.server.host }}
- --metrics-address={{ .Values.server.host }}
- --http-port=8000
- --grpc-port=8001
- --metrics-port=8002
{{- if eq .Values.server.logLevel "error" }}
- --log-warning=false
{{- end }}
{{- if has .Values.server.logLevel (list "error" "warning") }}
- --log-info=false
{{- end }}
{{- if eq .Values.server.logLevel "verbose" }}
- --log-verbose=1
{{- end }}
- --exit-timeout-secs={{ .Values.drain.timeoutSeconds }}
{{- with .Values.server.threads }}
- --backend-config=onnxruntime,enable-global-threadpool=1
- --backend-config=onnxruntime,intra_op_thread_count={{ . }}
{{- end }}
{{- if .Values.model.load }}
- --model-control-mode=explicit
{{- end }}
{{- range .Values.model.load }}
- --load-model={{ . }}
{{- end }}
{{- end }}
{{- if .Values.server.latencySummaries }}
- --metrics-config=summary_latencies=true
{{- end }}
{{- range .Values.server.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "carnelian.repository" -}}
{{- .Values.modelRepository.path -}}
{{- end -}}

{{- define "carnelian.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $limits := merge (dict .Values.gpu.resourceName (int .Values.gpu.count)) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "carnelian.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ mul .Values.sharedMemory.pythonInstances .Values.sharedMemory.mebibytesPerInstance }}Mi
{{- if eq .Values.modelRepository.source "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.modelRepository.pvc.claimName }}
    readOnly: true
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "carnelian.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: shared-memory
  mountPath: /dev/shm
{{- if eq .Values.modelRepository.source "pvc" }}
- name: models
  mountPath: {{ .Values.modelRepository.path }}
  readOnly: true
  {{- with .Values.modelRepository.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}
