{{/* The serving container's command line. Both runtimes end in the same options of tritonserver. */}}

{{- define "carnelian.command" -}}
{{- if eq .Values.runtime "wheel" -}}
- carnelian-serve
{{- else -}}
{{- /* What carnelian-serve gives its server, for NGC's image as it is: why is in serving/carnelian_serving, limits.py, environment.py and
shared_memory.py. Each connection is an open file: without one left, Triton writes an error to its log without end. The key of a Secret made
of a file often ends its line, which no header can: the arguments lose line ends behind them, and carriage returns. */ -}}
- sh
- -c
- |
  rm -f /dev/shm/triton_python_backend_shm_region_*
  ulimit -s 65536
  [ "$(ulimit -n)" -ge 65536 ] || ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
  export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_-268435456}"
  export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX-16}" DALI_MALLOC_POOL_THRESHOLD="${DALI_MALLOC_POOL_THRESHOLD-0}"
  export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS-1}"
  for argument; do shift; set -- "$@" "$(printf %s "$argument" | tr -d '\r')"; done
  exec tritonserver "$@"
- tritonserver
{{- end -}}
{{- end -}}

{{/* The CPU request of resources, which Kubernetes takes from the limit where there is none. */}}
{{- define "carnelian.cpu" -}}
{{- or (dig "requests" "cpu" "" .) (dig "limits" "cpu" "" .) -}}
{{- end -}}

{{/* The whole cores of each of some processes, at least one; takes (list resources processes). Empty without a request. */}}
{{- define "carnelian.cores" -}}
{{- with include "carnelian.cpu" (index . 0) -}}
{{- divf (include "carnelian.quantity" .) (index $ 1) | floor | int | max 1 -}}
{{- end -}}
{{- end -}}

{{/* A quantity as a number, of bytes or cores. */}}
{{- define "carnelian.quantity" -}}
{{- $unit := toString . | regexFind "(m|[kKMGT]i?)$" -}}
{{- $factor := dict "" 1 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (toString . | trimSuffix $unit) (get $factor $unit) -}}
{{- end -}}

{{/* The size of /dev/shm. */}}
{{- define "carnelian.sharedMemory" -}}
{{- mul .Values.sharedMemory.pythonInstances .Values.sharedMemory.mebibytesPerInstance }}Mi
{{- end -}}

{{/* Empty where nothing is to be said. */}}
{{- define "carnelian.threads" -}}
{{- if not (kindIs "invalid" .Values.server.threads) -}}
{{- with int .Values.server.threads -}}{{ . }}{{- end -}}
{{- else -}}
{{- include "carnelian.cores" (list .Values.resources 1) -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.args" -}}
{{- if eq .Values.runtime "wheel" -}}
- {{ printf "--repository=%s" (include "carnelian.repository" .) | quote }}
- {{ printf "--host=%s" .Values.server.host | quote }}
- --http-port=8000
- --grpc-port=8001
- --metrics-port=8002
- --log-level={{ .Values.server.logLevel }}
- --exit-timeout={{ .Values.drain.timeoutSeconds }}
- --start-timeout={{ .Values.probes.startup.timeoutSeconds }}
{{- with include "carnelian.threads" . }}
- --threads={{ . }}
{{- end }}
{{- range .Values.model.load }}
- --model={{ . }}
{{- end }}
- --
{{- else -}}
- {{ printf "--model-repository=%s" (include "carnelian.repository" .) | quote }}
{{- /* IPv6 is spelled as each of Triton's servers wants it; without quotes a colon at the end would make an object of it. */}}
{{- $host := .Values.server.host }}
{{- $ipv6 := contains ":" $host }}
- {{ printf "--http-address=%s%s" ($ipv6 | ternary "ipv6:" "") $host | quote }}
- {{ printf ($ipv6 | ternary "--grpc-address=[%s]" "--grpc-address=%s") $host | quote }}
- {{ printf "--metrics-address=%s%s" ($ipv6 | ternary "ipv6:" "") $host | quote }}
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
{{- with include "carnelian.threads" . }}
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
{{- with .Values.drain.connectionAgeSeconds }}
- --grpc-max-connection-age={{ mul . 1000 }}
- --grpc-max-connection-age-grace={{ mul $.Values.drain.timeoutSeconds 1000 }}
{{- end }}
{{- if .Values.tls.secretName }}
- --grpc-use-ssl=true
- --grpc-server-cert=/tls/tls.crt
- --grpc-server-key=/tls/tls.key
{{- if .Values.tls.mutual }}
- --grpc-use-ssl-mutual=true
- --grpc-root-cert=/tls/ca.crt
{{- end }}
{{- end }}
{{- with .Values.restrictedProtocols }}
{{- if .enabled }}
- --grpc-restricted-protocol={{ join "," .closed }}:{{ .header }}=$(CARNELIAN_ADMIN_KEY)
- --http-restricted-api={{ join "," .closed }}:{{ .header }}=$(CARNELIAN_ADMIN_KEY)
{{- end }}
{{- end }}
{{- range .Values.server.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "carnelian.repository" -}}
{{- eq .Values.modelRepository.source "bucket" | ternary .Values.modelRepository.bucket.url .Values.modelRepository.path -}}
{{- end -}}

{{- define "carnelian.ownEnv" -}}
{{- $bucket := .Values.modelRepository.bucket -}}
{{ include "carnelian.commonEnv" . }}
{{- if .Values.restrictedProtocols.enabled }}
- name: CARNELIAN_ADMIN_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "carnelian.adminSecretName" . | quote }}
      key: key
{{- end }}
{{- if and (eq .Values.modelRepository.source "bucket") $bucket.googleSecretName }}
- name: GOOGLE_APPLICATION_CREDENTIALS
  value: /google/credentials.json
{{- end }}
{{- end -}}

{{- define "carnelian.envFrom" -}}
{{- if and (eq .Values.modelRepository.source "bucket") .Values.modelRepository.bucket.secretName }}
- secretRef:
    name: {{ .Values.modelRepository.bucket.secretName | quote }}
{{- end }}
{{- with .Values.extraEnvFrom }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "carnelian.adminSecretName" -}}
{{- default (printf "%s-admin" (include "carnelian.fullname" .)) .Values.restrictedProtocols.existingSecret -}}
{{- end -}}

{{/* Tells meshes and Gateways what they would guess from the port's name otherwise, which says nothing of TLS. */}}
{{- define "carnelian.grpcProtocol" -}}
{{- .Values.tls.secretName | empty | ternary "kubernetes.io/h2c" "https" -}}
{{- end -}}

{{/* Fetches the models into the volume that the server mounts. The script runs on the Python of both images. */}}
{{- define "carnelian.downloader" -}}
- name: download
  image: {{ include "carnelian.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3, /scripts/download.py]
  args:
    - {{ .Values.modelRepository.download.url | quote }}
    - {{ .Values.modelRepository.download.sha256 | quote }}
    - {{ .Values.modelRepository.path | quote }}
  {{- $secret := .Values.modelRepository.download.secretName }}
  {{- if or $secret .Values.extraEnv }}
  env:
    {{- with $secret }}
    - name: AUTHORIZATION
      valueFrom:
        secretKeyRef:
          name: {{ . | quote }}
          key: authorization
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .Values.extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # The server's: a pod asks for the larger of the two, so this costs nothing, meets quotas and keeps the quality of service.
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: {{ .Values.modelRepository.path }}
    - name: scripts
      mountPath: /scripts
      readOnly: true
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "carnelian.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $limits := merge (dict .Values.gpu.resourceName (int .Values.gpu.count)) (default dict $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "carnelian.ownVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSize }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "carnelian.sharedMemory" . }}
{{- if eq .Values.modelRepository.source "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.modelRepository.pvc.claimName | quote }}
    readOnly: true
{{- else if eq .Values.modelRepository.source "download" }}
- name: models
  emptyDir:
    sizeLimit: {{ .Values.modelRepository.download.size }}
- name: scripts
  configMap:
    name: {{ include "carnelian.fullname" . }}-scripts
{{- else if and (eq .Values.modelRepository.source "bucket") .Values.modelRepository.bucket.googleSecretName }}
- name: google
  secret:
    secretName: {{ .Values.modelRepository.bucket.googleSecretName | quote }}
    defaultMode: 0440
{{- end }}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    {{- /* By name, so that a pod does not start where one is missing: Triton would, and refuse every client. */}}
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- if $.Values.tls.mutual }}
      - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "carnelian.ownVolumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: shared-memory
  mountPath: /dev/shm
{{- if has .Values.modelRepository.source (list "pvc" "download") }}
- name: models
  mountPath: {{ .Values.modelRepository.path }}
  readOnly: true
  {{- if eq .Values.modelRepository.source "pvc" }}
  {{- with .Values.modelRepository.pvc.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
  {{- end }}
{{- else if and (eq .Values.modelRepository.source "bucket") .Values.modelRepository.bucket.googleSecretName }}
- name: google
  mountPath: /google
  readOnly: true
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end }}
{{- end -}}
