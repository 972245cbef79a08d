{{/* The pods of a cluster, and the submitter's: (dict "root" $ "role" "head", "worker", "controller" or "submitter" "pod" its values) */}}

{{- define "rayzero.gracePeriod" -}}
{{- $checkpoint := .Values.job.spec.checkpoint | default dict -}}
{{- $checkpoint.grace_period_s | default $checkpoint.notice_s | default 30 | float64 | ceil | int -}}
{{- end -}}

{{/* With podTemplate on top. Containers that are new in it are as locked down as the chart's own, unless
     they say otherwise. */}}
{{- define "rayzero.pod" -}}
{{- $base := include (ternary "rayzero.submitter" "rayzero.pod.base" (eq .role "submitter")) . -}}
{{- if .pod.podTemplate -}}
{{- $old := fromYaml $base -}}
{{- $pod := get (include "rayzero.merge" (dict "old" $old "new" .pod.podTemplate "key" "") | fromJson) "out" -}}
{{- $security := include "rayzero.container.security" .root | fromYaml -}}
{{- $all := list -}}
{{- range $kind := list "containers" "initContainers" -}}
{{- $known := list -}}
{{- range index $old.spec $kind | default list -}}{{- $known = append $known .name -}}{{- end -}}
{{- $all = concat $all $known -}}
{{- range index $pod.spec $kind | default list -}}
{{- if not (has .name $known) -}}
{{- $merged := include "rayzero.merge" (dict "old" $security "new" (.securityContext | default dict) "key" "") | fromJson -}}
{{- $_ := set . "securityContext" $merged.out -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $paths := dict "head" "head.podTemplate.spec" "controller" "controller.podTemplate.spec" "submitter" "job.submitter.podTemplate.spec" -}}
{{- $path := get $paths .role | default (printf "workers.podTemplate.spec (group %s)" (.pod.name | default "")) -}}
{{- range concat (index $pod.spec "containers" | default list) (index $pod.spec "initContainers" | default list) -}}
{{- if not .image -}}
{{- fail (printf "%s: container %s has no image; give one, or name a container that is there: %s" $path .name (join ", " $all)) -}}
{{- end -}}
{{- $has := .securityContext | default dict -}}
{{- $user := index $pod.spec.securityContext "runAsUser" -}}
{{- $guarded := index $pod.spec.securityContext "runAsNonRoot" -}}
{{- if hasKey $has "runAsUser" -}}{{- $user = $has.runAsUser -}}{{- end -}}
{{- if hasKey $has "runAsNonRoot" -}}{{- $guarded = $has.runAsNonRoot -}}{{- end -}}
{{- $added := dig "capabilities" "add" list $has -}}
{{- if and $added (not $has.allowPrivilegeEscalation) (or $guarded (gt (int $user) 0)) -}}
{{- $other := ternary ". Or leave IPC_LOCK out, where the nodes' container runtime has LimitMEMLOCK=infinity" "" (has "IPC_LOCK" $added) -}}
{{- fail (printf "%s: container %s adds the capabilities %s, and does not run as root: Kubernetes gives them to root only. Set securityContext.runAsUser to 0 and runAsNonRoot to false, of the pod and of the container%s" $path .name (join ", " $added) $other) -}}
{{- end -}}
{{- if and $has.privileged (hasKey $has "allowPrivilegeEscalation") (not $has.allowPrivilegeEscalation) -}}
{{- fail (printf "%s: container %s is privileged, which Kubernetes takes only with securityContext.allowPrivilegeEscalation: true" $path .name) -}}
{{- end -}}
{{- end -}}
{{- toYaml $pod -}}
{{- else -}}
{{- $base -}}
{{- end -}}
{{- end -}}

{{/* The rule of podTemplate, as JSON {"out": ...}: (dict "old" "new" "key" the list's name). Maps are merged
     key by key, null removes a key; lists of maps are merged by `name` (mounts by `mountPath`), what is new in
     them is appended; other lists, and empty ones, replace. */}}
{{- define "rayzero.merge" -}}
{{- $out := .new -}}
{{- if and (kindIs "map" .old) (kindIs "map" .new) -}}
{{- $out = deepCopy .old -}}
{{- range $key, $value := .new -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $out $key -}}
{{- else if hasKey $out $key -}}
{{- $merged := include "rayzero.merge" (dict "old" (get $out $key) "new" $value "key" $key) | fromJson -}}
{{- $_ := set $out $key $merged.out -}}
{{- else -}}
{{- $_ := set $out $key $value -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" .old) (kindIs "slice" .new) .new (kindIs "map" (first (append .new 0))) -}}
{{- $by := ternary "mountPath" "name" (eq .key "volumeMounts") -}}
{{- $out = .old -}}
{{- range $item := .new -}}
{{- $next := list -}}
{{- $found := false -}}
{{- range $out -}}
{{- if and (hasKey . $by) (eq (get . $by) (get $item $by)) -}}
{{- $merged := include "rayzero.merge" (dict "old" . "new" $item "key" "") | fromJson -}}
{{- $next = append $next $merged.out -}}
{{- $found = true -}}
{{- else -}}
{{- $next = append $next . -}}
{{- end -}}
{{- end -}}
{{- $out = ternary $next (append $next $item) $found -}}
{{- end -}}
{{- end -}}
{{- dict "out" $out | toJson -}}
{{- end -}}

{{/* The ports of the Ray container of the head, which KubeRay's service also has, as a JSON list. */}}
{{- define "rayzero.head.ports" -}}
{{- $ports := list
  (dict "name" "gcs-server" "port" 6379) (dict "name" "dashboard" "port" 8265)
  (dict "name" "commands" "port" .Values.head.commandPort) (dict "name" "client" "port" 10001)
  (dict "name" "metrics" "port" 8080) -}}
{{- if .Values.metrics.enabled -}}
{{- $ports = concat $ports (include "rayzero.metrics.ports" . | fromJsonArray) -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* Labels and annotations: what a pod gives itself wins over what all have. */}}
{{- define "rayzero.pod.metadata" -}}
{{- $own := dict "app.kubernetes.io/component" .role -}}
labels:
  {{- include "rayzero.selector" .root | nindent 2 }}
  {{- toYaml (mustMergeOverwrite $own (deepCopy .root.Values.commonLabels) (.pod.labels | default dict)) | nindent 2 }}
{{- with mustMergeOverwrite (deepCopy .root.Values.commonAnnotations) (.pod.annotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of every pod's spec: where it may run, and as whom. */}}
{{- define "rayzero.pod.common" -}}
enableServiceLinks: false
securityContext:
  {{- include "rayzero.pod.security" .root | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $.pod $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rayzero.pod.base" -}}
{{- $root := .root -}}
{{- $gracePeriod := include "rayzero.gracePeriod" $root | int -}}
metadata:
  {{- include "rayzero.pod.metadata" . | nindent 2 }}
spec:
  serviceAccountName: {{ include (printf "rayzero.%s.account" .role) $root }}
  automountServiceAccountToken: {{ and (eq .role "head") $root.Values.autoscaler.enabled }}
  {{- $scaled := and $root.Values.autoscaler.enabled (eq $root.Values.autoscaler.version "v2") }}
  {{- $beside := and (eq .role "head") (eq $root.Values.mode "job") (eq $root.Values.job.submissionMode "SidecarMode") }}
  restartPolicy: {{ ternary "Never" "Always" (or $scaled $beside) }}
  terminationGracePeriodSeconds: {{ .pod.terminationGracePeriodSeconds | default (add $gracePeriod 15) | int }}
  {{- include "rayzero.pod.common" . | nindent 2 }}
  {{- with $root.Values.code.git }}
  {{- if .repository }}
  initContainers:
    - name: code
      image: {{ .image }}
      args:
        - --repo={{ .repository }}
        - --ref={{ .commit }}
        - --root=/code
        - --link=current
        - --depth=1
        - --one-time
        {{- if .secretName }}
        - --username={{ .username }}
        - --password-file=/etc/git/token
        {{- end }}
      securityContext:
        {{- include "rayzero.container.security" $root | nindent 8 }}
      resources:
        requests: {cpu: 100m, memory: 256Mi}
        limits: {memory: 1Gi}
      env:
        - {name: HOME, value: /tmp}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: code, mountPath: /code}
        {{- if .secretName }}
        - {name: git, mountPath: /etc/git, readOnly: true}
        {{- end }}
  {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ .role }}
      image: {{ include "rayzero.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      workingDir: /work
      securityContext:
        {{- include "rayzero.container.security" $root | nindent 8 }}
      resources:
        {{- toYaml .pod.resources | nindent 8 }}
      {{- if eq .role "head" }}
      ports:
        {{- range include "rayzero.head.ports" $root | fromJsonArray }}
        - {name: {{ .name }}, containerPort: {{ int .port }}}
        {{- end }}
      {{- if .pod.stopJobsOnTermination }}
      lifecycle:
        preStop:
          exec:
            command: [python, -m, rayzero.orchestrator.job.prestop, {{ add $gracePeriod 5 | quote }}{{ if $root.Values.gcsFaultTolerance.enabled }}, unless-workers-stay{{ end }}]
      {{- end }}
      {{- else }}
      ports:
        - {name: metrics, containerPort: 8080}
        {{- if and (eq .role "controller") $root.Values.metrics.enabled }}
        {{- range include "rayzero.metrics.ports" $root | fromJsonArray }}
        - {name: {{ .name }}, containerPort: {{ int .port }}}
        {{- end }}
        {{- end }}
      {{- if .pod.drainOnTermination }}
      lifecycle:
        preStop:
          exec:
            command: [python, -m, rayzero.workers.prestop, {{ $gracePeriod | quote }}]
      {{- end }}
      {{- end }}
      env:
        {{- include "rayzero.env" . | nindent 8 }}
      {{- $secret := $root.Values.storage.objectStore.secretName }}
      {{- if or $secret .pod.envFrom }}
      envFrom:
        {{- with $secret }}
        - secretRef: {name: {{ . }}}
        {{- end }}
        {{- with .pod.envFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: work, mountPath: /work}
        - {name: shared-mem, mountPath: /dev/shm}
        {{- if and (eq .role "head") (eq $root.Values.mode "job") }}
        - {name: job, mountPath: /etc/rayzero, readOnly: true}
        {{- end }}
        {{- if and (eq .role "head") (include "rayzero.gcs.files" $root) }}
        - {name: gcs, mountPath: /var/lib/ray-gcs}
        {{- end }}
        {{- if $root.Values.code.git.repository }}
        - {name: code, mountPath: /code, readOnly: true}
        {{- end }}
        {{- include "rayzero.storage.mounts" $root | nindent 8 }}
        {{- with .pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ .pod.tmpSize }}}
    - name: work
      emptyDir: {sizeLimit: {{ .pod.tmpSize }}}
    - name: shared-mem
      emptyDir: {medium: Memory, sizeLimit: {{ .pod.shmSize }}}
    {{- if and (eq .role "head") (eq $root.Values.mode "job") }}
    - name: job
      configMap: {name: {{ include "rayzero.jobname" $root }}-job}
    {{- end }}
    {{- if and (eq .role "head") (include "rayzero.gcs.files" $root) }}
    - name: gcs
      {{- with $root.Values.gcsFaultTolerance.storage }}
      {{- if or .existingClaim .size }}
      persistentVolumeClaim: {claimName: {{ include "rayzero.gcs.claim" $root }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
      {{- end }}
    {{- end }}
    {{- with $root.Values.code.git }}
    {{- if .repository }}
    - name: code
      emptyDir: {sizeLimit: 5Gi}
    {{- if .secretName }}
    - name: git
      secret: {secretName: {{ .secretName }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- include "rayzero.storage.volumes" $root | nindent 4 }}
    {{- with .pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* An arbitrary uid has no entry in /etc/passwd: what asks for a user or a home finds them here. */}}
{{- define "rayzero.env" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /tmp}
- {name: USER, value: rayzero}
- {name: LOGNAME, value: rayzero}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- with $values.code.git }}
{{- if .repository }}
- {name: PYTHONPATH, value: {{ trimSuffix "/" (printf "/code/current/%s" .path) }}:/app}
{{- end }}
{{- end }}
{{- with $values.healthCheck }}
- {name: RAY_health_check_initial_delay_ms, value: {{ int .initialDelayMs | quote }}}
- {name: RAY_health_check_period_ms, value: {{ int .periodMs | quote }}}
- {name: RAY_health_check_timeout_ms, value: {{ int .timeoutMs | quote }}}
- {name: RAY_health_check_failure_threshold, value: {{ int .failureThreshold | quote }}}
- {name: RAY_grpc_client_keepalive_time_ms, value: {{ int .keepaliveTimeMs | quote }}}
- {name: RAY_grpc_client_keepalive_timeout_ms, value: {{ int .keepaliveTimeoutMs | quote }}}
{{- end }}
{{- if $values.gcsFaultTolerance.enabled }}
{{- $recovery := $values.job.spec.recovery | default dict }}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: {{ $recovery.orphan_s | default 600 | float64 | ceil | int | quote }}}
{{- end }}
{{- if and (eq .role "head") (include "rayzero.gcs.files" .root) }}
- name: RAYZERO_CLUSTER
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['ray.io/cluster']"}
- {name: RAY_gcs_storage, value: rocksdb}
- {name: RAY_gcs_storage_path, value: /var/lib/ray-gcs/$(RAYZERO_CLUSTER)}
{{- end }}
{{- if eq .role "head" }}
- {name: RAYZERO_COMMAND_PORT, value: {{ int $values.head.commandPort | quote }}}
{{- else }}
{{- range $name, $value := $values.nccl }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- include "rayzero.storage.env" .root }}
{{- with .pod.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}
