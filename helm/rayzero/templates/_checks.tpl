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
{{- if and .Values.kueue.queueName .Values.autoscaler.enabled -}}
{{- fail "kueue.queueName and autoscaler.enabled: Kueue admits a cluster as a whole; set autoscaler.enabled to false" -}}
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
{{- include "rayzero.check.gpus" . -}}
{{- include "rayzero.check.secrets" . -}}
{{- end -}}

{{/* The job's workers must fit the pods there may be at most. Fractions of a GPU are left to Ray. */}}
{{- define "rayzero.check.gpus" -}}
{{- $least := dig "workers" "min" 1 .Values.job.spec | int -}}
{{- $gpus := dig "workers" "gpus" 0 .Values.job.spec | float64 -}}
{{- if and (eq .Values.mode "job") (eq $gpus 1.0) -}}
{{- $room := 0 -}}
{{- range include "rayzero.groups" . | fromJsonArray -}}
{{- $each := 0 -}}
{{- range $name, $count := (.resources.limits | default dict) -}}
{{- if and $count (regexMatch "gpu$" $name) -}}{{- $each = int $count -}}{{- end -}}
{{- end -}}
{{- $most := ternary (int .max) (int .min) $.Values.autoscaler.enabled -}}
{{- $room = add $room (mul $each $most) -}}
{{- end -}}
{{- if lt (int $room) $least -}}
{{- fail (printf "job.spec.workers.min: %d workers need a GPU each, and all worker pods together have %d (workers.max, workers.resources.limits)" $least (int $room)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
