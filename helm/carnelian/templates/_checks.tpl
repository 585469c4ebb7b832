{{/* What the schema cannot say because it concerns several values. Every message says what to change. */}}
{{- define "carnelian.check" -}}
{{- include "carnelian.checkNames" . -}}
{{- include "carnelian.checkPod" . -}}
{{- include "carnelian.checkRepository" . -}}
{{- include "carnelian.checkExtras" . -}}
{{- include "carnelian.checkArguments" . -}}
{{- include "carnelian.checkNetwork" . -}}
{{- include "carnelian.checkScaling" . -}}
{{- include "carnelian.checkUpdates" . -}}
{{- include "carnelian.checkJobs" . -}}
{{- include "carnelian.checkRequests" . -}}
{{- end -}}

{{- define "carnelian.checkNames" -}}
{{- $name := include "carnelian.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the objects would be called %s, but a Service's name is a letter, then letters, digits and -; set fullnameOverride" $name) -}}
{{- end -}}
{{- if gt (len $name) 46 -}}
{{- fail (printf "the objects would be called %s, which leaves no room for suffixes; set fullnameOverride, of 46 characters at most" $name) -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkPod" -}}
{{- if and (gt (int .Values.gpu.count) 0) (ne .Values.runtime "native") -}}
{{- fail (printf "gpu.count is %v, but `runtime: %s` has no GPU backends; set runtime: native" .Values.gpu.count .Values.runtime) -}}
{{- end -}}
{{- include "carnelian.checkMemory" (list "" .Values.resources (include "carnelian.sharedMemory" .)) -}}
{{- /* The kubelet adds up the limits of all containers: with others, there may be room for what the server's own has none. */ -}}
{{- with and (not .Values.extraContainers) (dig "limits" "ephemeral-storage" "" .Values.resources) -}}
{{- $size := include "carnelian.quantity" $.Values.tmpSize | float64 -}}
{{- $counted := printf "tmpSize, %s" $.Values.tmpSize -}}
{{- if eq $.Values.modelRepository.source "download" -}}
{{- $size = include "carnelian.quantity" $.Values.modelRepository.download.size | float64 | addf $size -}}
{{- $counted = printf "%s, and modelRepository.download.size, %s" $counted $.Values.modelRepository.download.size -}}
{{- end -}}
{{- if le (include "carnelian.quantity" . | float64) $size -}}
{{- fail (printf "resources.limits.ephemeral-storage is %s, but %s, may be used of it, so the pod would be evicted before that is full; raise it, or lower the size" (toJson .) $counted) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^(127\\.|localhost$|::1$)" .Values.server.host -}}
{{- fail (printf "server.host is %s, where neither probes nor Services reach the pod; set 0.0.0.0 or ::, and close HTTP with service.exposeHttp: false and networkPolicy" .Values.server.host) -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkRepository" -}}
{{- if and .Values.model.load (not (has .Values.model.name .Values.model.load)) -}}
{{- fail (printf "model.name is %s, but model.load does not have it, so the pods would never be ready; add it" .Values.model.name) -}}
{{- end -}}
{{- if and (eq .Values.modelRepository.source "pvc") (not .Values.modelRepository.pvc.claimName) -}}
{{- fail "modelRepository.source is pvc, but modelRepository.pvc.claimName is empty; name the claim" -}}
{{- end -}}
{{- $repository := .Values.modelRepository -}}
{{- if eq $repository.source "bucket" -}}
{{- if not $repository.bucket.url -}}
{{- fail "modelRepository.source is bucket, but modelRepository.bucket.url is empty; give s3://, gs:// or as://" -}}
{{- end -}}
{{- if ne .Values.runtime "native" -}}
{{- fail (printf "modelRepository.source is bucket, but `runtime: %s` cannot read buckets; set runtime: native, or source: download" .Values.runtime) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $repository.source "download") (not (and $repository.download.url $repository.download.sha256)) -}}
{{- fail "modelRepository.source is download, but modelRepository.download has no url or no sha256; give both" -}}
{{- end -}}
{{- if and (hasPrefix "http://" (default "" $repository.download.url)) $repository.download.secretName -}}
{{- fail "modelRepository.download.secretName is set, but modelRepository.download.url is http://, which sends it in the clear; use https://, or leave secretName empty" -}}
{{- end -}}
{{- /* An update that sets one of these would change nothing, and succeed. */ -}}
{{- range $source, $keys := dict "pvc" (list "claimName" "subPath") "bucket" (list "url") "download" (list "url" "sha256") -}}
{{- range $key := $keys -}}
{{- if and (ne $repository.source $source) (index $repository $source $key) -}}
{{- fail (printf "modelRepository.%s.%s is set, but modelRepository.source is %s, which does not read it; set source: %s, or leave it empty" $source $key $repository.source $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Which of two variables a container gets depends on who applies the manifest; the others are refused in the cluster. */}}
{{- define "carnelian.checkExtras" -}}
{{- $own := include "carnelian.ownEnv" . | fromYamlArray -}}
{{- $mounts := include "carnelian.ownVolumeMounts" . | fromYamlArray -}}
{{- $containers := list (dict "name" "server") -}}
{{- if eq .Values.modelRepository.source "download" -}}
{{- if .Values.modelRepository.download.secretName -}}{{- $own = append $own (dict "name" "AUTHORIZATION") -}}{{- end -}}
{{- $mounts = append $mounts (dict "mountPath" "/scripts") -}}
{{- $containers = append $containers (dict "name" "download") -}}
{{- end -}}
{{- include "carnelian.checkTwice" (list "extraVolumes" "name" .Values.extraVolumes (include "carnelian.ownVolumes" . | fromYamlArray)) -}}
{{- include "carnelian.checkTwice" (list "extraVolumeMounts" "mountPath" .Values.extraVolumeMounts $mounts) -}}
{{- $extra := concat (default list .Values.extraInitContainers) (default list .Values.extraContainers) -}}
{{- include "carnelian.checkTwice" (list "extraInitContainers + extraContainers" "name" $extra $containers) -}}
{{- include "carnelian.checkTwice" (list "extraEnv" "name" .Values.extraEnv $own) -}}
{{- if .Values.training.enabled -}}
{{- include "carnelian.checkTwice" (list "training.extraEnv" "name" .Values.training.extraEnv (include "carnelian.trainingEnv" .Values.training | fromYamlArray)) -}}
{{- $own := "[{name: data, mountPath: /data}, {name: tmp, mountPath: /tmp}, {name: shared-memory, mountPath: /dev/shm}]" | fromYamlArray -}}
{{- include "carnelian.checkTwice" (list "training.extraVolumes" "name" .Values.training.extraVolumes $own) -}}
{{- include "carnelian.checkTwice" (list "training.extraVolumeMounts" "mountPath" .Values.training.extraVolumeMounts $own) -}}
{{- end -}}
{{- if .Values.perf.enabled -}}
{{- include "carnelian.checkTwice" (list "perf.extraEnv" "name" .Values.perf.extraEnv (include "carnelian.commonEnv" . | fromYamlArray)) -}}
{{- $own := "[{name: grid, mountPath: /grid}, {name: results, mountPath: /results}, {name: tmp, mountPath: /tmp}]" | fromYamlArray -}}
{{- include "carnelian.checkTwice" (list "perf.extraVolumes" "name" .Values.perf.extraVolumes $own) -}}
{{- include "carnelian.checkTwice" (list "perf.extraVolumeMounts" "mountPath" .Values.perf.extraVolumeMounts $own) -}}
{{- end -}}
{{- end -}}

{{/* carnelian-serve refuses some, and tritonserver would have them twice, or a pod never be ready. It takes the beginning of a name
for the whole. */}}
{{- define "carnelian.checkArguments" -}}
{{- $own := "which the chart sets itself" -}}
{{- $control := "but explicit lets callers load code, and poll reads folders that are half copied" -}}
{{- $port := "but its port is for probes, Services and monitors" -}}
{{- $open := "but it opens a port through which all protocols are called without the key" -}}
{{- $cached := "but Triton's cache gives a caller the answer to another one's options" -}}
{{- $refused := dict
  "--http-port" (list $own "service.httpPort")
  "--grpc-port" (list $own "service.grpcPort")
  "--metrics-port" (list $own "")
  "--exit-timeout-secs" (list $own "drain.timeoutSeconds")
  "--model-repository" (list $own "modelRepository")
  "--model-store" (list $own "modelRepository")
  "--model-control-mode" (list (empty .Values.model.load | ternary $control $own) "model.load")
  "--http-address" (list $own "server.host")
  "--grpc-address" (list $own "server.host")
  "--metrics-address" (list $own "server.host")
  "--http-restricted-api" (list $own "restrictedProtocols")
  "--grpc-restricted-protocol" (list $own "restrictedProtocols")
  "--allow-http" (list $port "")
  "--allow-grpc" (list $port "")
  "--allow-metrics" (list $port "")
  "--allow-sagemaker" (list $open "")
  "--allow-vertex-ai" (list $open "")
  "--cache-config" (list $cached "")
  "--response-cache-byte-size" (list $cached "")
-}}
{{- range .Values.server.extraArgs -}}
{{- $name := splitList "=" . | first -}}
{{- range $option, $advice := $refused -}}
{{- if hasPrefix $name $option -}}
{{- $value := index $advice 1 -}}
{{- fail (printf "server.extraArgs has %s, %s; remove it%s" $option (index $advice 0) (empty $value | ternary "" (printf ", and set %s" $value))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkNetwork" -}}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerSourceRanges is set, but service.type is %s, which ignores it; use networkPolicy.clients" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.service.loadBalancerClass (ne .Values.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerClass is set, but service.type is %s; set it to LoadBalancer" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.service.externalTrafficPolicy (eq .Values.service.type "ClusterIP") -}}
{{- fail "service.externalTrafficPolicy is set, but service.type is ClusterIP, which nothing outside reaches; set NodePort or LoadBalancer" -}}
{{- end -}}
{{- if and (gt (len (default list .Values.service.ipFamilies)) 1) (not (hasSuffix "DualStack" (default "" .Values.service.ipFamilyPolicy))) -}}
{{- fail "service.ipFamilies has two, but service.ipFamilyPolicy does not ask for two; set PreferDualStack or RequireDualStack" -}}
{{- end -}}
{{- $ipv6 := or (has "IPv6" .Values.service.ipFamilies) (eq (default "" .Values.service.ipFamilyPolicy) "RequireDualStack") -}}
{{- if and $ipv6 (not (contains ":" .Values.server.host)) -}}
{{- fail (printf "service.ipFamilies or service.ipFamilyPolicy asks for IPv6, but server.host is %s, where pods do not listen on it; set server.host: \"::\"" .Values.server.host) -}}
{{- end -}}
{{- if and .Values.service.exposeHttp (eq (int .Values.service.grpcPort) (int .Values.service.httpPort)) -}}
{{- fail (printf "service.grpcPort and service.httpPort are both %v, but a Service has a port once; give each its own" .Values.service.grpcPort) -}}
{{- end -}}
{{- if and .Values.tls.mutual (not .Values.tls.secretName) -}}
{{- fail "tls.mutual is true, but tls.secretName is empty; name the Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- with .Values.restrictedProtocols -}}
{{- if and .key .existingSecret -}}
{{- fail "restrictedProtocols.key and restrictedProtocols.existingSecret are both set; choose one" -}}
{{- end -}}
{{- if and .enabled (not .closed) -}}
{{- fail "restrictedProtocols.enabled is true, but restrictedProtocols.closed is empty; name protocols, or disable it" -}}
{{- end -}}
{{- /* Triton's explicit control mode, which loads models that come with a request. */ -}}
{{- if and (eq $.Values.runtime "native") $.Values.model.load (not (and .enabled (has "model-repository" .closed))) -}}
{{- fail "model.load is set with `runtime: native`, so that whoever reaches the server could load models, and run code there, but restrictedProtocols does not close model-repository; close it, or leave model.load empty" -}}
{{- end -}}
{{- end -}}
{{- range $protocol := list "grpc" "http" -}}
{{- $ingress := index $.Values.ingress $protocol -}}
{{- if and $ingress.enabled (not $ingress.host) -}}
{{- fail (printf "ingress.%s.enabled is true, but ingress.%s.host is empty; without one it would take every host" $protocol $protocol) -}}
{{- end -}}
{{- if and (index $.Values.gateway $protocol "enabled") (not $.Values.gateway.parentRefs) -}}
{{- fail (printf "gateway.%s.enabled is true, but gateway.parentRefs is empty; name a Gateway" $protocol) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway -}}
{{- $shared := or (not .grpc.hostnames) (not .http.hostnames) -}}
{{- range $grpc := .grpc.hostnames -}}
{{- range $http := $.Values.gateway.http.hostnames -}}
{{- /* *.a.b is every name below a.b, of any depth. */ -}}
{{- $below := or (and (hasPrefix "*." $grpc) (hasSuffix (trimPrefix "*" $grpc) $http)) (and (hasPrefix "*." $http) (hasSuffix (trimPrefix "*" $http) $grpc)) -}}
{{- $shared = or $shared (eq $grpc $http) $below -}}
{{- end -}}
{{- end -}}
{{- if and .grpc.enabled .http.enabled $shared -}}
{{- fail "gateway.grpc.hostnames and gateway.http.hostnames overlap, but a Gateway accepts one kind of route for a host name; give each its own" -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.ingress.http.enabled .Values.gateway.http.enabled) (not .Values.service.exposeHttp) -}}
{{- fail "service.exposeHttp is false, but ingress.http or gateway.http leads to it; disable them, or set it true" -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkScaling" -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor are both enabled, so each pod would be scraped twice; choose one" -}}
{{- end -}}
{{- range $monitor := list .Values.monitoring.serviceMonitor .Values.monitoring.podMonitor -}}
{{- if and $monitor.enabled $.Values.monitoring.rules.enabled (gt (int $monitor.intervalSeconds) 60) -}}
{{- fail (printf "monitoring.rules.enabled is true, but its rates are of two minutes and need two scrapes, and one is made in %v s; lower monitoring's intervalSeconds to 60" $monitor.intervalSeconds) -}}
{{- end -}}
{{- if and $monitor.enabled (ne $.Values.autoscaling.mode "none") (lt (int $.Values.autoscaling.windowSeconds) (mul 2 $monitor.intervalSeconds)) -}}
{{- fail (printf "autoscaling.windowSeconds is %v, but a rate needs two scrapes, and one is made in %v s; raise it" $.Values.autoscaling.windowSeconds $monitor.intervalSeconds) -}}
{{- end -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %v, above autoscaling.maxReplicas, %v; change one" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and (eq .mode "hpa") (lt (int .minReplicas) 1) -}}
{{- fail "autoscaling.minReplicas is 0, but an HPA keeps at least one pod; set 1, or autoscaling.mode: keda" -}}
{{- end -}}
{{- if and .cpuPercent (ne .mode "none") (not (include "carnelian.cpu" $.Values.resources)) -}}
{{- fail (printf "autoscaling.cpuPercent is %v, but resources.requests.cpu, of which it is a share, is not set; set it, or cpuPercent: null" .cpuPercent) -}}
{{- end -}}
{{- if and (eq .mode "keda") (lt (int .minReplicas) 1) (not .keda.activationQuery) -}}
{{- fail "autoscaling.minReplicas is 0, but without pods there are no queues to see; set autoscaling.keda.activationQuery" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkUpdates" -}}
{{- if and (has (toString .Values.updateStrategy.maxSurge) (list "0" "0%")) (has (toString .Values.updateStrategy.maxUnavailable) (list "0" "0%")) -}}
{{- fail "updateStrategy.maxSurge and updateStrategy.maxUnavailable are both 0, so no update could begin; raise one" -}}
{{- end -}}
{{- if le (int .Values.progressDeadlineSeconds) (int .Values.probes.startup.timeoutSeconds) -}}
{{- fail (printf "progressDeadlineSeconds is %v, but a pod may take probes.startup.timeoutSeconds, %v, to start; raise it" .Values.progressDeadlineSeconds .Values.probes.startup.timeoutSeconds) -}}
{{- end -}}
{{- with .Values.drain -}}
{{- /* gRPC ends connections up to a tenth earlier or later. */ -}}
{{- if gt (mul 11 .connectionAgeSeconds) (mul 10 .delaySeconds) -}}
{{- fail (printf "drain.connectionAgeSeconds is %v, but connections must have ended within drain.delaySeconds, %v, or requests are lost when a pod leaves; make it smaller" .connectionAgeSeconds .delaySeconds) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkJobs" -}}
{{- if and .Values.training.enabled (not .Values.training.claimName) -}}
{{- fail "training.enabled is true, but training.claimName is empty, so checkpoints would be lost; name a claim" -}}
{{- end -}}
{{- if .Values.training.enabled -}}
{{- include "carnelian.checkMemory" (list "training." .Values.training.resources .Values.training.sharedMemory) -}}
{{- end -}}
{{- if and .Values.training.enabled (has .Values.training.name (list "metrics" "headless" (ternary .Values.perf.name "" .Values.perf.enabled))) -}}
{{- fail (printf "training.name is %s, but another object is called so; choose another" .Values.training.name) -}}
{{- end -}}
{{- if and .Values.perf.enabled (has .Values.perf.name (list "dashboard" "scripts" "test")) -}}
{{- fail (printf "perf.name is %s, but another object is called so; choose another" .Values.perf.name) -}}
{{- end -}}
{{- if and .Values.perf.enabled .Values.tls.secretName -}}
{{- fail "perf.enabled is true, but carnelian-perf does not encrypt and tls.secretName is set; measure a release without TLS" -}}
{{- end -}}
{{- if and .Values.perf.enabled .Values.model.load -}}
{{- range $name := .Values.perf.grid.models | default (dict .Values.model.name dict) | keys | sortAlpha -}}
{{- range $needed := $.Values.perf.grid.static | empty | ternary (list $name) (list $name (printf "%s_pcm" $name)) -}}
{{- if not (has $needed $.Values.model.load) -}}
{{- fail (printf "perf.enabled is true and measures %s, but model.load does not have it; add it, or set perf.grid.static: null if it ends in _pcm" $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "carnelian.checkRequests" -}}
{{- with .Values -}}
{{- range $section, $resources := dict "" .resources "training." .training.resources "perf." .perf.resources "test." .test.resources -}}
{{- range $name, $request := $resources.requests -}}
{{- $limit := dig "limits" $name "" $resources -}}
{{- if and (ne (toString $limit) "") (gt (include "carnelian.quantity" $request | float64) (include "carnelian.quantity" $limit | float64)) -}}
{{- fail (printf "%sresources.requests.%s is %s, above %sresources.limits.%s, %s; change one" $section $name (toJson $request) $section $name (toJson $limit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A container may fill its /dev/shm; takes (list section resources size). */}}
{{- define "carnelian.checkMemory" -}}
{{- $section := index . 0 -}}
{{- $size := index . 2 -}}
{{- with dig "limits" "memory" "" (index . 1) -}}
{{- /* Of a values file, a number is a float, which would be printed as 5e+08. */ -}}
{{- $limit := and (kindIs "float64" .) (eq (float64 .) (int64 . | float64)) | ternary (int64 .) . -}}
{{- if le (include "carnelian.quantity" . | float64) (include "carnelian.quantity" $size | float64) -}}
{{- fail (printf "%sresources.limits.memory is %v, but /dev/shm, which counts as memory, may hold %s, so the container would be killed before that is full; raise it, or lower %ssharedMemory" $section $limit $size $section) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Nothing twice, by one of its fields; takes (list "value" "field" given own). */}}
{{- define "carnelian.checkTwice" -}}
{{- $value := index . 0 -}}
{{- $field := index . 1 -}}
{{- $names := list -}}
{{- range index . 3 -}}{{- $names = append $names (get . $field) -}}{{- end -}}
{{- $given := list -}}
{{- range index . 2 -}}
{{- $name := get . $field -}}
{{- if has $name $names -}}
{{- fail (printf "%s has %s, which the chart sets itself; remove it or change it" $value $name) -}}
{{- end -}}
{{- if has $name $given -}}
{{- fail (printf "%s has %s twice; remove one" $value $name) -}}
{{- end -}}
{{- $given = append $given $name -}}
{{- end -}}
{{- end -}}
