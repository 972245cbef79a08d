{{/* What a schema cannot see: values that do not go together. Each message names the values. */}}

{{- define "rayzero.checks" -}}
{{- $values := .Values -}}
{{- with .Values.storage -}}
{{- if and .objectStore.url .pvc.enabled -}}
{{- fail "storage.objectStore.url and storage.pvc.enabled: checkpoints lie in one place; set one of them" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.mode "job" -}}
{{- $path := dig "checkpoint" "path" (include "rayzero.storage.path" .) .Values.job.spec -}}
{{- if not $path -}}
{{- fail "storage: the job's files would be lost with its pods; set storage.pvc.enabled, storage.objectStore.url or job.spec.checkpoint.path" -}}
{{- end -}}
{{- $removed := and .Values.job.shutdownAfterJobFinishes (not .Values.job.deletionStrategy) -}}
{{- if and .Values.job.suspend (not $removed) -}}
{{- fail "job.suspend and job.shutdownAfterJobFinishes: KubeRay suspends only jobs whose cluster ends with them; set the latter to true, and no job.deletionStrategy" -}}
{{- end -}}
{{- if and .Values.autoscaler.enabled (contains "DeleteWorkers" (toJson .Values.job.deletionStrategy)) -}}
{{- fail "job.deletionStrategy and autoscaler.enabled: KubeRay deletes workers alone only without the autoscaler" -}}
{{- end -}}
{{- if and .Values.kueue.queueName (not .Values.job.shutdownAfterJobFinishes) -}}
{{- fail "kueue.queueName and job.shutdownAfterJobFinishes: Kueue takes only jobs whose cluster ends with them" -}}
{{- end -}}
{{- end -}}
{{- with .Values.kueue -}}
{{- if and .queueName $.Values.autoscaler.enabled (not .elastic) -}}
{{- fail "kueue.queueName and autoscaler.enabled: Kueue admits a cluster as a whole; set autoscaler.enabled to false, or kueue.elastic to true if Kueue has the feature gate ElasticJobsViaWorkloadSlices" -}}
{{- end -}}
{{- if and .elastic (not (and .queueName $.Values.autoscaler.enabled)) -}}
{{- fail "kueue.elastic: needs kueue.queueName, and autoscaler.enabled, which changes the number of pods" -}}
{{- end -}}
{{- if and .queueName $.Values.gang.scheduler -}}
{{- fail "kueue.queueName and gang.scheduler: one of them admits the pods together; set one" -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.gang.scheduler) (or .Values.gang.queueName .Values.gang.priorityClass) -}}
{{- fail "gang.queueName and gang.priorityClass: they need gang.scheduler, volcano or yunikorn" -}}
{{- end -}}
{{- if and .Values.gang.priorityClass (ne .Values.gang.scheduler "volcano") -}}
{{- fail "gang.priorityClass: KubeRay knows it with volcano only; with yunikorn set workers.priorityClassName and head.priorityClassName" -}}
{{- end -}}
{{- range .Values.extraObjects -}}
{{- if eq .kind "Secret" -}}
{{- fail (printf "extraObjects: the Secret %s would lie in the values and in the release; make it with kubectl or an ExternalSecret" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "rayzero.fullname" .)) -}}
{{- fail (printf "fullnameOverride: KubeRay takes no name like %s; it begins with a letter, and has letters, digits and -" (include "rayzero.fullname" .)) -}}
{{- end -}}
{{- if and .Values.auth.enabled (not (semverCompare ">=2.52.0-0" .Values.rayVersion)) -}}
{{- fail (printf "rayVersion and auth.enabled: Ray %s knows no tokens; they came with 2.52.0" .Values.rayVersion) -}}
{{- end -}}
{{- $names := list -}}
{{- range $index, $group := include "rayzero.groups" . | fromJsonArray -}}
{{- if lt (int $group.max) (int $group.min) -}}
{{- fail (printf "workerGroups[%d] %s: max (%d) is less than min (%d)" $index $group.name (int $group.max) (int $group.min)) -}}
{{- end -}}
{{- if has $group.name $names -}}
{{- fail (printf "workerGroups[%d].name: %s is there twice" $index $group.name) -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- $gracePeriod := include "rayzero.gracePeriod" $ | int -}}
{{- with $group.terminationGracePeriodSeconds -}}
{{- if lt (int .) $gracePeriod -}}
{{- fail (printf "workers.terminationGracePeriodSeconds: %d is less than job.spec.checkpoint.grace_period_s, which is %d: the last checkpoint would be cut off" (int .) $gracePeriod) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "rayzero.check.ports" . -}}
{{- include "rayzero.check.room" . -}}
{{- include "rayzero.check.secrets" . -}}
{{- end -}}

{{- define "rayzero.check.ports" -}}
{{- $taken := dict -}}
{{- range include "rayzero.head.ports" . | fromJsonArray -}}
{{- with get $taken (int .port | toString) -}}
{{- fail (printf "head.commandPort, metrics.port, metrics.ports: %s; each port of the head is for one thing: give other ports" .) -}}
{{- end -}}
{{- $_ := set $taken (int .port | toString) (printf "%d is the port of %s" (int .port) .name) -}}
{{- end -}}
{{- end -}}

{{/* The job's workers must fit the pods there may be at most, by CPUs and GPUs as KubeRay tells Ray of
     them: rayStartParams, else the limits. */}}
{{- define "rayzero.check.room" -}}
{{- $workers := .Values.job.spec.workers | default dict -}}
{{- $least := $workers.min | default 1 | int -}}
{{- $cpus := $workers.cpus | default 1 | float64 -}}
{{- $gpus := $workers.gpus | default 0 | float64 -}}
{{- if eq .Values.mode "job" -}}
{{- $room := 0 -}}
{{- $pods := list -}}
{{- range include "rayzero.groups" . | fromJsonArray -}}
{{- $most := ternary (int .max) (int .min) $.Values.autoscaler.enabled -}}
{{- $has := include "rayzero.room" (dict "pod" . "cpus" $cpus "gpus" $gpus) | fromJson -}}
{{- $room = add $room (mul $most (int $has.workers)) -}}
{{- $pods = append $pods (printf "%d of %s with %v CPUs and %v GPUs each, room for %d workers" $most .name $has.cpus $has.gpus (int $has.workers)) -}}
{{- end -}}
{{- if gt (int .Values.head.numCpus) 0 -}}
{{- $params := merge (deepCopy .Values.head.rayStartParams) (dict "num-cpus" .Values.head.numCpus) -}}
{{- $head := dict "rayStartParams" $params "resources" .Values.head.resources -}}
{{- $has := include "rayzero.room" (dict "pod" $head "cpus" $cpus "gpus" $gpus) | fromJson -}}
{{- $room = add $room (int $has.workers) -}}
{{- end -}}
{{- if lt (int $room) $least -}}
{{- fail (printf "job.spec.workers: %d workers (min) of %v CPUs (cpus) and %v GPUs (gpus) each do not fit the pods: there are at most %s. Lower job.spec.workers, or raise workers.resources.limits, workers.max (without the autoscaler workers.min), or workers.rayStartParams (num-cpus, num-gpus) where a device plugin or a resource claim gives them" $least $cpus $gpus (join "; " $pods)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What one pod has, and how many workers fit it, as JSON: (dict "pod" "cpus" "gpus") */}}
{{- define "rayzero.room" -}}
{{- $limits := .pod.resources.limits | default dict -}}
{{- $params := .pod.rayStartParams | default dict -}}
{{- $text := get $params "num-cpus" | default $limits.cpu | default .pod.resources.requests.cpu | default "0" | toString -}}
{{- $cpus := ternary (divf (trimSuffix "m" $text | float64) 1000) (float64 $text) (hasSuffix "m" $text) | ceil -}}
{{- $gpus := 0 -}}
{{- range $name, $count := $limits -}}
{{- if and $count (regexMatch "gpu$" $name) -}}{{- $gpus = int $count -}}{{- end -}}
{{- end -}}
{{- with get $params "num-gpus" -}}{{- $gpus = int . -}}{{- end -}}
{{- $workers := divf $cpus .cpus | floor | int -}}
{{- if gt .gpus 0.0 -}}{{- $workers = min $workers (divf $gpus .gpus | floor | int) -}}{{- end -}}
{{- dict "cpus" $cpus "gpus" $gpus "workers" $workers | toJson -}}
{{- end -}}
