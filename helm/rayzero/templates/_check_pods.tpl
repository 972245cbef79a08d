{{/* What the chart or KubeRay sets in a pod, and no value may: (dict "path" "pod") */}}
{{- define "rayzero.check.pod" -}}
{{- $path := .path -}}
{{- $volumes := list "tmp" "work" "shared-mem" "job" "gcs" "code" "git" "checkpoints" "credentials" -}}
{{- range $index, $volume := .pod.volumes -}}
{{- if has $volume.name $volumes -}}
{{- fail (printf "%s.volumes[%d].name: %s is a volume of the chart (as are %s); take another name, or change the chart's own by %s.podTemplate" $path $index $volume.name (join ", " $volumes) $path) -}}
{{- end -}}
{{- end -}}
{{- $folders := list "/tmp" "/work" "/dev/shm" "/var/lib/ray-gcs" "/code" "/etc/rayzero" "/etc/rayzero-credentials" -}}
{{- range $index, $mount := .pod.volumeMounts -}}
{{- if has (trimSuffix "/" $mount.mountPath) $folders -}}
{{- fail (printf "%s.volumeMounts[%d].mountPath: the chart mounts %s itself (also %s); take another folder, or change the chart's own by %s.podTemplate" $path $index $mount.mountPath (join ", " $folders) $path) -}}
{{- end -}}
{{- end -}}
{{- $redis := "gcsFaultTolerance" -}}
{{- $instead := dict "RAY_REDIS_ADDRESS" $redis "REDIS_PASSWORD" $redis "REDIS_USERNAME" $redis
  "RAY_gcs_storage" $redis "RAY_gcs_storage_path" $redis
  "RAY_gcs_rpc_server_reconnect_timeout_s" "job.spec.recovery.orphan_s"
  "RAY_enable_autoscaler_v2" "autoscaler.version" "RAYZERO_COMMAND_PORT" "head.commandPort" "RAY_AUTH_MODE" "auth.enabled" -}}
{{- range $index, $entry := .pod.env -}}
{{- with get $instead $entry.name -}}
{{- fail (printf "%s.env[%d].name: %s follows from %s; set that instead" $path $index $entry.name .) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "port" "dashboard-port" "ray-client-server-port" "metrics-export-port" "head" "block" "address" -}}
{{- if hasKey ($.pod.rayStartParams | default dict) $name -}}
{{- fail (printf "%s.rayStartParams.%s: KubeRay and the chart set it, and the ports of pods, service and network policy are made for it; leave it out" $path $name) -}}
{{- end -}}
{{- end -}}
{{- $template := .pod.podTemplate | default dict -}}
{{- $labels := dict (printf "%s.labels" $path) .pod.labels (printf "%s.podTemplate.metadata.labels" $path) (dig "metadata" "labels" dict $template) -}}
{{- include "rayzero.check.labels" $labels -}}
{{- $spec := $template.spec | default dict -}}
{{- if and $spec.terminationGracePeriodSeconds (ne $path "job.submitter") -}}
{{- fail (printf "%s.podTemplate.spec.terminationGracePeriodSeconds: set %s.terminationGracePeriodSeconds, which is checked against the last checkpoint's time" $path $path) -}}
{{- end -}}
{{- if $spec.restartPolicy -}}
{{- fail (printf "%s.podTemplate.spec.restartPolicy: KubeRay asks for one that follows from autoscaler.version and job.submissionMode; leave it out" $path) -}}
{{- end -}}
{{- range $index, $container := $spec.containers -}}
{{- $resources := $container.resources | default dict -}}
{{- if and (has $container.name (list "ray-head" "ray-worker" "ray-controller" "ray-job-submitter")) (or $resources.limits $resources.requests) -}}
{{- fail (printf "%s.podTemplate.spec.containers[%d].resources: the limits and requests of %s are %s.resources, which the chart checks; here only claims" $path $index $container.name $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of pods, by the path of the values */}}
{{- define "rayzero.check.labels" -}}
{{- range $path, $labels := . -}}
{{- range $name := list "app.kubernetes.io/instance" "app.kubernetes.io/part-of" "app.kubernetes.io/component" -}}
{{- if hasKey ($labels | default dict) $name -}}
{{- fail (printf "%s: %s is what services and network policies find the pod by; take another label" $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What Kubernetes asks of requests and limits, and that /dev/shm fits in: (dict "path" "pod") */}}
{{- define "rayzero.check.resources" -}}
{{- $path := .path -}}
{{- $limits := .pod.resources.limits -}}
{{- range $name, $request := .pod.resources.requests -}}
{{- $limit := get $limits $name -}}
{{- if and $request $limit (gt (include "rayzero.number" $request | float64) (include "rayzero.number" $limit | float64)) -}}
{{- fail (printf "%s.resources: requests.%s (%v) is more than limits.%s (%v); Kubernetes takes at most the limit: set both" $path $name $request $name $limit) -}}
{{- end -}}
{{- if and $request (contains "/" $name) (ne (toString $request) (toString $limit)) -}}
{{- fail (printf "%s.resources: requests.%s is %v, limits.%s is %v; Kubernetes takes only equal ones of a device: set both" $path $name $request $name ($limit | default "not set")) -}}
{{- end -}}
{{- end -}}
{{- with .pod.shmSize -}}
{{- if ge (include "rayzero.number" . | float64) (include "rayzero.number" $limits.memory | float64) -}}
{{- fail (printf "%s.shmSize: %s is no less than resources.limits.memory (%v), of which it is a part; lower it, or raise the limit" $path . $limits.memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The submitter's pod, which only K8sJobMode has. */}}
{{- define "rayzero.check.submitter" -}}
{{- with .Values.job -}}
{{- if ne .submissionMode "K8sJobMode" -}}
{{- range $key, $value := omit .submitter "backoffLimit" "resources" -}}
{{- if $value -}}
{{- fail (printf "job.submitter.%s: with job.submissionMode %s there is no submitter's pod; leave it out, or set K8sJobMode" $key $.Values.job.submissionMode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "rayzero.check.pod" (dict "path" "job.submitter" "pod" .submitter) -}}
{{- include "rayzero.check.resources" (dict "path" "job.submitter" "pod" .submitter) -}}
{{- end -}}
{{- end -}}

{{/* A quantity as a number */}}
{{- define "rayzero.number" -}}
{{- $factors := dict "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0
  "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- if $unit -}}{{- mulf (trimSuffix $unit $text | float64) (get $factors $unit) -}}{{- else -}}{{- float64 $text -}}{{- end -}}
{{- end -}}

{{/* The workers that the job starts, its ranks and those of each role, as JSON */}}
{{- define "rayzero.kinds" -}}
{{- $kinds := list -}}
{{- range $role, $spec := merge (dict "" .Values.job.spec) (deepCopy (.Values.job.spec.roles | default dict)) -}}
{{- $workers := $spec.workers | default dict -}}
{{- $least := $workers.min | default 1 | int -}}
{{- $cpus := $workers.cpus | default 1 | float64 -}}
{{- $gpus := $workers.gpus | default 0 | float64 -}}
{{- $text := printf "%d workers (min) of %v CPUs (cpus) and %v GPUs (gpus) each" $least $cpus $gpus -}}
{{- if $role -}}{{- $text = printf "%s for role %s" $text $role -}}{{- end -}}
{{- $kinds = append $kinds (dict "role" $role "text" $text "cpus" $cpus "gpus" $gpus "min" $least "max" ($workers.max | default $least | int)) -}}
{{- end -}}
{{- toJson $kinds -}}
{{- end -}}

{{/* Places workers in pods, those that take most GPUs first, then most CPUs:
     (dict "pods" (list (dict "count" "cpus" "gpus")) "kinds" "number" "min"). Returns what is left in the pods,
     and the workers without a place, as JSON. */}}
{{- define "rayzero.pack" -}}
{{- $pods := .pods -}}
{{- $homeless := list -}}
{{- $sorted := dict -}}
{{- range .kinds -}}{{- $_ := set $sorted (printf "%012.3f %012.3f %s" .gpus .cpus .role) . -}}{{- end -}}
{{- range keys $sorted | sortAlpha | reverse -}}
{{- $kind := get $sorted . -}}
{{- $left := get $kind $.number | int -}}
{{- $before := $pods -}}
{{- $pods = list -}}
{{- range $pod := $before -}}
{{- $fit := include "rayzero.fit" (dict "pod" $pod "kind" $kind) | int -}}
{{- $full := 0 -}}
{{- $some := 0 -}}
{{- if $fit -}}
{{- $full = min $pod.count (div $left $fit) | int -}}
{{- if lt $full (int $pod.count) -}}{{- $some = mod $left $fit | int -}}{{- end -}}
{{- end -}}
{{- $left = sub $left (add $some (mul $full $fit)) | int -}}
{{- $one := ternary 1 0 (gt $some 0) -}}
{{- range list (list (sub $pod.count (add $full $one)) 0) (list $full $fit) (list $one $some) -}}
{{- if gt (first . | int) 0 -}}
{{- $taken := last . -}}
{{- $pods = append $pods (dict "count" (first .) "cpus" (subf $pod.cpus (mulf $taken $kind.cpus)) "gpus" (subf $pod.gpus (mulf $taken $kind.gpus))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $left -}}{{- $homeless = append $homeless (printf "%d%s" $left (ternary (printf " of role %s" $kind.role) " of the ranks" (ne $kind.role ""))) -}}{{- end -}}
{{- end -}}
{{- dict "pods" $pods "homeless" $homeless | toJson -}}
{{- end -}}

{{/* How many workers of a kind a pod has room for: (dict "pod" "kind") */}}
{{- define "rayzero.fit" -}}
{{- $fit := addf (divf .pod.cpus .kind.cpus) 1e-6 | floor -}}
{{- if gt .kind.gpus 0.0 -}}{{- $fit = minf $fit (addf (divf .pod.gpus .kind.gpus) 1e-6 | floor) -}}{{- end -}}
{{- int $fit -}}
{{- end -}}

{{/* The workers of the job and of its roles must fit the pods there may be at most, by CPUs and GPUs as KubeRay
     tells Ray of them: rayStartParams, else the limits. */}}
{{- define "rayzero.check.room" -}}
{{- $kinds := include "rayzero.kinds" . | fromJsonArray -}}
{{- $ranks := first $kinds -}}
{{- $gpus := 0.0 -}}
{{- range $kinds -}}{{- $gpus = addf $gpus .gpus -}}{{- end -}}
{{- if eq .Values.mode "job" -}}
{{- $pods := list -}}
{{- $texts := list -}}
{{- range include "rayzero.groups" . | fromJsonArray -}}
{{- $most := ternary (int .max) (int .min) $.Values.autoscaler.enabled -}}
{{- $has := include "rayzero.room" . | fromJson -}}
{{- if and $most (gt $has.gpus 0.0) (eq $gpus 0.0) -}}
{{- fail (printf "job.spec.workers.gpus, workers.resources: the job's workers%s take no GPU (gpus: 0), and each pod of %s has %v, which would be idle; set job.spec.workers.gpus%s to 1, or nvidia.com/gpu to null in workers.resources.requests and limits" (ternary " and roles" "" (gt (len $kinds) 1)) .name $has.gpus (ternary " or that of a role" "" (gt (len $kinds) 1))) -}}
{{- end -}}
{{- $pods = append $pods (merge (dict "count" $most) $has) -}}
{{- $text := printf "%d of %s with %v CPUs and %v GPUs each" $most .name $has.cpus $has.gpus -}}
{{- if eq (len $kinds) 1 -}}{{- $text = printf "%s, room for %s workers" $text (include "rayzero.fit" (dict "pod" $has "kind" $ranks)) -}}{{- end -}}
{{- $texts = append $texts $text -}}
{{- end -}}
{{- if gt (int .Values.head.numCpus) 0 -}}
{{- $params := merge (deepCopy .Values.head.rayStartParams) (dict "num-cpus" .Values.head.numCpus) -}}
{{- $head := dict "rayStartParams" $params "resources" .Values.head.resources -}}
{{- $pods = append $pods (merge (dict "count" 1) (include "rayzero.room" $head | fromJson)) -}}
{{- end -}}
{{- $packed := include "rayzero.pack" (dict "pods" $pods "kinds" $kinds "number" "min") | fromJson -}}
{{- if $packed.homeless -}}
{{- $wanted := list -}}
{{- range $kinds -}}{{- $wanted = append $wanted .text -}}{{- end -}}
{{- $paths := "job.spec.workers" -}}
{{- $which := "" -}}
{{- if gt (len $kinds) 1 -}}
{{- $paths = "job.spec.workers, job.spec.roles" -}}
{{- $which = printf ", and %s have no place" (join ", " $packed.homeless) -}}
{{- end -}}
{{- fail (printf "%s: %s do not fit the pods: there are at most %s%s. Lower %s, or raise workers.resources.limits, workers.max (without the autoscaler workers.min), or workers.rayStartParams (num-cpus, num-gpus) where a device plugin or a resource claim gives them" $paths (join ", " $wanted) (join "; " $texts) $which $paths) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Warnings about GPUs that no worker of the job will use, one a line */}}
{{- define "rayzero.idle" -}}
{{- $kinds := include "rayzero.kinds" . | fromJsonArray -}}
{{- $ranks := first $kinds -}}
{{- $groups := include "rayzero.groups" . | fromJsonArray -}}
{{- if gt (len $kinds) 1 -}}
{{- include "rayzero.idle.roles" (dict "kinds" $kinds "groups" $groups) -}}
{{- else -}}
{{- $room := 0 -}}
{{- range $groups -}}
{{- $has := include "rayzero.room" . | fromJson -}}
{{- $workers := include "rayzero.fit" (dict "pod" $has "kind" $ranks) | int -}}
{{- $idle := sub (int $has.gpus) (mulf $workers $ranks.gpus | int) -}}
{{- $room = add $room (mul (int .min) $workers) -}}
{{- if gt $idle 0 }}
WARNING: {{ $idle }} of the {{ $has.gpus }} GPUs of each pod of {{ .name }} will be idle: its {{ $has.cpus }} CPUs are enough for {{ $workers }} workers
of {{ $ranks.cpus }} CPUs. Lower job.spec.workers.cpus, or raise workers.resources.limits.cpu.
{{- end -}}
{{- end -}}
{{- if and (gt $ranks.gpus 0.0) (gt (int $room) (int $ranks.max)) }}
WARNING: workers.min pods have room for {{ $room }} workers, and the job has at most {{ $ranks.max }} (job.spec.workers.max): the other GPUs
will be idle. Lower workers.min, or raise job.spec.workers.max.
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The same where roles share the pods: (dict "kinds" "groups") */}}
{{- define "rayzero.idle.roles" -}}
{{- $pods := list -}}
{{- $all := 0.0 -}}
{{- range .groups -}}
{{- $has := include "rayzero.room" . | fromJson -}}
{{- $all = addf $all (mulf (int .min) $has.gpus) -}}
{{- $pods = append $pods (merge (dict "count" (int .min)) $has) -}}
{{- end -}}
{{- $idle := 0.0 -}}
{{- range (include "rayzero.pack" (dict "pods" $pods "kinds" .kinds "number" "max") | fromJson).pods -}}
{{- $idle = addf $idle (mulf .count (floor (addf .gpus 1e-6))) -}}
{{- end -}}
{{- if gt $idle 0.0 }}
WARNING: {{ $idle }} of the {{ $all }} GPUs of workers.min pods will be idle when the job and its roles have the most workers that they may:
lower workers.min or the workers' cpus, or raise job.spec.workers.max or that of a role.
{{- end -}}
{{- end -}}

{{/* The CPUs and GPUs of a pod, as JSON */}}
{{- define "rayzero.room" -}}
{{- $limits := .resources.limits | default dict -}}
{{- $params := .rayStartParams | default dict -}}
{{- $text := get $params "num-cpus" | default $limits.cpu | default .resources.requests.cpu | default "0" | toString -}}
{{- $cpus := ternary (divf (trimSuffix "m" $text | float64) 1000) (float64 $text) (hasSuffix "m" $text) | ceil -}}
{{- $gpus := 0 -}}
{{- range $name, $count := $limits -}}
{{- if and $count (regexMatch "gpu$" $name) -}}{{- $gpus = int $count -}}{{- end -}}
{{- end -}}
{{- with get $params "num-gpus" -}}{{- $gpus = int . -}}{{- end -}}
{{- dict "cpus" $cpus "gpus" $gpus | toJson -}}
{{- end -}}
