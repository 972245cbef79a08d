{{/* What a schema cannot see: values that do not go together. Each message names the values. */}}

{{- define "rayzero.checks" -}}
{{- if not .Values.image.repository -}}
{{- fail "image.repository: not given; build the image with this project's Dockerfile, push it, and set its name with the registry, such as registry.example.com/rayzero. An image that was loaded onto the nodes (kind, minikube) is named as it is there: rayzero" -}}
{{- end -}}
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
{{- $lost := or (not (hasPrefix "/" $path)) (regexMatch "^/(tmp|work|dev/shm)(/|$)" $path) -}}
{{- range .Values.head.volumeMounts -}}{{- if hasPrefix .mountPath $path -}}{{- $lost = false -}}{{- end -}}{{- end -}}
{{- if and $lost (not (contains "://" $path)) -}}
{{- fail (printf "job.spec.checkpoint.path: %s would be lost with the head's pod; leave it out for the folder of storage.pvc or storage.objectStore, or give a URL or a path in a volume" $path) -}}
{{- end -}}
{{- $removed := and .Values.job.shutdownAfterJobFinishes (not .Values.job.deletionStrategy) -}}
{{- if and .Values.job.suspend (not $removed) -}}
{{- fail "job.suspend, job.shutdownAfterJobFinishes, job.deletionStrategy: KubeRay suspends only jobs whose cluster ends with them; set shutdownAfterJobFinishes to true, and no deletionStrategy" -}}
{{- end -}}
{{- if and .Values.autoscaler.enabled (contains "DeleteWorkers" (toJson .Values.job.deletionStrategy)) -}}
{{- fail "job.deletionStrategy and autoscaler.enabled: KubeRay deletes workers alone only without the autoscaler; set autoscaler.enabled to false, or the policy to DeleteCluster" -}}
{{- end -}}
{{- if and .Values.kueue.queueName (not .Values.job.shutdownAfterJobFinishes) -}}
{{- fail "kueue.queueName and job.shutdownAfterJobFinishes: Kueue takes only jobs whose cluster ends with them; set shutdownAfterJobFinishes to true" -}}
{{- end -}}
{{- end -}}
{{- with .Values.kueue -}}
{{- if and .queueName $.Values.autoscaler.enabled (not .elastic) -}}
{{- fail "kueue.queueName and autoscaler.enabled: Kueue admits a cluster as a whole; set autoscaler.enabled to false, or kueue.elastic to true if Kueue has the feature gate ElasticJobsViaWorkloadSlices" -}}
{{- end -}}
{{- if and .elastic (not (and .queueName $.Values.autoscaler.enabled)) -}}
{{- fail "kueue.elastic: needs kueue.queueName, and autoscaler.enabled, which changes the number of pods" -}}
{{- end -}}
{{- if and .priorityClass (not .queueName) -}}
{{- fail "kueue.priorityClass: needs kueue.queueName; without Kueue set head.priorityClassName and workers.priorityClassName" -}}
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
{{- with .Values.serviceAccount -}}
{{- if and .annotations (not .create) -}}
{{- fail (printf "serviceAccount.annotations: the chart annotates only accounts that it makes; annotate %s yourself, or set serviceAccount.create to true" (.name | default .workerName | default "default")) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraObjects -}}
{{- if eq .kind "Secret" -}}
{{- fail (printf "extraObjects: the Secret %s would lie in the values and in the release; make it with kubectl or an ExternalSecret" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "rayzero.fullname" .)) -}}
{{- fail (printf "fullnameOverride: KubeRay takes no name like %s; it begins with a letter, and has lower-case letters, digits and -" (include "rayzero.fullname" .)) -}}
{{- end -}}
{{- if and .Values.auth.enabled (not (semverCompare ">=2.52.0-0" .Values.rayVersion)) -}}
{{- fail (printf "rayVersion and auth.enabled: Ray %s knows no tokens; set rayVersion to 2.52.0 or newer (that of the image), or auth.enabled to false" .Values.rayVersion) -}}
{{- end -}}
{{- if and (not .Values.auth.enabled) (ne .Values.head.serviceType "ClusterIP") -}}
{{- fail (printf "auth.enabled and head.serviceType: anyone who reaches a %s could run code; set auth.enabled to true, or serviceType to ClusterIP" .Values.head.serviceType) -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .egress.enabled (not .egress.rules) $.Values.autoscaler.enabled -}}
{{- fail "networkPolicy.egress.rules: the autoscaler needs the Kubernetes API, which egress.enabled shuts out; add a rule for it, or set autoscaler.enabled to false" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.controller.enabled (not .Values.gcsFaultTolerance.enabled) -}}
{{- fail "controller.enabled: without gcsFaultTolerance.enabled the whole cluster ends with its head; set it to true, or controller.enabled to false" -}}
{{- end -}}
{{- $names := ternary (list "controller") list .Values.controller.enabled -}}
{{- range $index, $group := include "rayzero.groups" . | fromJsonArray -}}
{{- if lt (int $group.max) (int $group.min) -}}
{{- fail (printf "workers.max, workers.min or those of workerGroups[%d] (%s): max is %d, less than min, which is %d; raise max or lower min" $index $group.name (int $group.max) (int $group.min)) -}}
{{- end -}}
{{- if has $group.name $names -}}
{{- fail (printf "workerGroups[%d].name: %s is there twice; give each group a name of its own" $index $group.name) -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- $gracePeriod := include "rayzero.gracePeriod" $ | int -}}
{{- with $group.terminationGracePeriodSeconds -}}
{{- if lt (int .) $gracePeriod -}}
{{- fail (printf "workers.terminationGracePeriodSeconds: %d is less than job.spec.checkpoint.grace_period_s, which is %d: the last checkpoint would be cut off; raise it, or leave it out" (int .) $gracePeriod) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if kindIs "map" .Values.job.spec.engine -}}
{{- include "rayzero.check.engine" (dict "root" . "path" "job.spec.engine" "engine" .Values.job.spec.engine) -}}
{{- else if eq .Values.mode "job" -}}
{{- include "rayzero.check.engine" (dict "root" . "path" "job.engine" "engine" .Values.job.engine) -}}
{{- end -}}
{{- include "rayzero.check.ports" . -}}
{{- include "rayzero.check.labels" (dict "commonLabels" .Values.commonLabels) -}}
{{- include "rayzero.check.pod" (dict "path" "head" "pod" .Values.head) -}}
{{- include "rayzero.check.pod" (dict "path" "workers" "pod" .Values.workers) -}}
{{- range $index, $group := .Values.workerGroups -}}
{{- include "rayzero.check.pod" (dict "path" (printf "workerGroups[%d]" $index) "pod" $group) -}}
{{- end -}}
{{- include "rayzero.check.pod" (dict "path" "controller" "pod" .Values.controller) -}}
{{- if .Values.controller.enabled -}}
{{- include "rayzero.check.resources" (dict "path" "controller" "pod" (include "rayzero.controller.values" . | fromJson)) -}}
{{- end -}}
{{- include "rayzero.check.submitter" . -}}
{{- include "rayzero.check.resources" (dict "path" "head" "pod" .Values.head) -}}
{{- range include "rayzero.groups" . | fromJsonArray -}}
{{- include "rayzero.check.resources" (dict "path" (printf "workers (group %s)" .name) "pod" .) -}}
{{- end -}}
{{- include "rayzero.check.room" . -}}
{{- include "rayzero.check.secrets" . -}}
{{- end -}}

{{- define "rayzero.check.ports" -}}
{{- $taken := dict -}}
{{- range include "rayzero.head.ports" . | fromJsonArray -}}
{{- $port := int .port | toString -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "head.commandPort, metrics.port, metrics.ports: %s would be the port of %s and of %s; give ports that nothing else has" $port (get $taken $port) .name) -}}
{{- end -}}
{{- $_ := set $taken $port .name -}}
{{- end -}}
{{- end -}}

{{/* Keys of the engine config that are refused if they request something, as they are when the job starts; without
     it that would be on GPUs: (dict "root" "path" "engine") */}}
{{- define "rayzero.check.engine" -}}
{{- $path := .path -}}
{{- $engine := .engine -}}
{{- range $key := .root.Files.Get "files/refused.json" | fromJsonArray -}}
{{- $section := $engine -}}
{{- $names := splitList "." $key.path -}}
{{- range initial $names -}}
{{- $inner := get $section . -}}
{{- $section = ternary $inner dict (kindIs "map" $inner) -}}
{{- end -}}
{{- $value := get $section (last $names) -}}
{{- $unset := list "auto" "false" "False" -}}
{{- $requested := and $value (not (has $value $unset)) (ne (toJson $value) (toJson $key.default)) -}}
{{- if and $requested (kindIs "map" $value) (ne $key.active "set") -}}
{{- $enabled := get $value "enabled" -}}
{{- if not (hasKey $value "enabled") -}}{{- $enabled = eq $key.active "present" -}}{{- end -}}
{{- $requested = and $enabled (not (has $enabled $unset)) -}}
{{- end -}}
{{- range $name := list "enabled" "device" -}}
{{- if and $requested (hasKey $key $name) -}}
{{- $switch := get $key $name -}}
{{- if hasKey $section $name -}}{{- $switch = get $section $name -}}{{- end -}}
{{- $requested = and $switch (not (has $switch (append $unset "none"))) -}}
{{- end -}}
{{- end -}}
{{- if $requested -}}
{{- fail (printf "%s.%s: refused: %s (seen: %s)" $path $key.path $key.text (toJson $value)) -}}
{{- end -}}
{{- end -}}
{{- $both := true -}}
{{- range list "fp16" "bf16" -}}
{{- $enabled := get $engine . -}}
{{- if kindIs "map" $enabled -}}{{- $enabled = get $enabled "enabled" -}}{{- end -}}
{{- if ne (toJson $enabled) "true" -}}{{- $both = false -}}{{- end -}}
{{- end -}}
{{- if $both -}}
{{- fail (printf "%s.fp16.enabled, %s.bf16.enabled: both are true; set one to false" $path $path) -}}
{{- end -}}
{{- end -}}
