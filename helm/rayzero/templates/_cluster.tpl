{{/* The spec of a RayCluster, of its own or inside a RayJob. */}}

{{/* The worker groups, each with all its values, as JSON: what a group gives wins, its resources replace
     the others' as a whole, and its podTemplate is merged by the rule of podTemplate. */}}
{{- define "rayzero.groups" -}}
{{- $groups := list -}}
{{- range .Values.workerGroups -}}
{{- $group := mustMergeOverwrite (deepCopy $.Values.workers) (deepCopy .) -}}
{{- if .resources -}}{{- $_ := set $group "resources" .resources -}}{{- end -}}
{{- if .podTemplate -}}
{{- $merged := include "rayzero.merge" (dict "old" $.Values.workers.podTemplate "new" .podTemplate "key" "") | fromJson -}}
{{- $_ := set $group "podTemplate" $merged.out -}}
{{- end -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* The values of the controllers' pod, as JSON: the head's, where it has none of its own. */}}
{{- define "rayzero.controller.values" -}}
{{- $pod := set (omit .Values.head "podTemplate") "drainOnTermination" true -}}
{{- range $key, $value := omit .Values.controller "enabled" -}}
{{- if $value -}}{{- $_ := set $pod $key $value -}}{{- end -}}
{{- end -}}
{{- toJson $pod -}}
{{- end -}}

{{- define "rayzero.cluster" -}}
rayVersion: {{ .Values.rayVersion | quote }}
enableInTreeAutoscaling: {{ .Values.autoscaler.enabled }}
{{- with .Values.autoscaler }}
{{- if .enabled }}
autoscalerOptions:
  version: {{ .version }}
  upscalingMode: {{ .upscalingMode }}
  idleTimeoutSeconds: {{ int .idleTimeoutSeconds }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  securityContext:
    {{- include "rayzero.container.security" $ | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
authOptions:
  mode: {{ ternary "token" "disabled" .Values.auth.enabled }}
  {{- with .Values.auth.secretName }}
  secretName: {{ . }}
  {{- end }}
{{- if .Values.tls.enabled }}
tlsOptions:
  enabled: true
{{- end }}
{{- with .Values.gcsFaultTolerance }}
{{- if and .enabled (eq .backend "redis") }}
gcsFaultToleranceOptions:
  redisAddress: {{ .redisAddress }}
  {{- if .passwordSecret.name }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ .passwordSecret.name }}, key: {{ .passwordSecret.key }}}
  {{- end }}
  {{- with .externalStorageNamespace }}
  externalStorageNamespace: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  serviceType: {{ .Values.head.serviceType }}
  rayStartParams:
    {{- $usual := dict "dashboard-host" "0.0.0.0" "num-cpus" .Values.head.numCpus }}
    {{- toYaml (merge (deepCopy .Values.head.rayStartParams) $usual) | nindent 4 }}
  template:
    {{- include "rayzero.pod" (dict "root" . "role" "head" "pod" .Values.head) | nindent 4 }}
workerGroupSpecs:
  {{- range include "rayzero.groups" . | fromJsonArray }}
  - groupName: {{ .name }}
    replicas: {{ int .min }}
    minReplicas: {{ int .min }}
    maxReplicas: {{ int .max }}
    {{- if and $.Values.autoscaler.enabled (eq $.Values.autoscaler.version "v2") }}
    idleTimeoutSeconds: {{ int .idleTimeoutSeconds }}
    {{- end }}
    rayStartParams:
      {{- toYaml .rayStartParams | nindent 6 }}
    template:
      {{- include "rayzero.pod" (dict "root" $ "role" "worker" "pod" .) | nindent 6 }}
  {{- end }}
  {{- if .Values.controller.enabled }}
  - groupName: controller
    replicas: 1
    minReplicas: 1
    maxReplicas: 1
    rayStartParams:
      num-cpus: "0"
      resources: {{ dict "rayzero_controller" 1 | toJson | toJson | squote }}
    template:
      {{- include "rayzero.pod" (dict "root" $ "role" "controller" "pod" (include "rayzero.controller.values" . | fromJson)) | nindent 6 }}
  {{- end }}
{{- end -}}

{{/* Labels that Kueue, or KubeRay for a batch scheduler, reads of a RayJob or RayCluster. */}}
{{- define "rayzero.queue" -}}
{{- with .Values.gang }}
{{- if eq .scheduler "volcano" }}
ray.io/scheduler-name: volcano
{{- with .queueName }}
volcano.sh/queue-name: {{ . }}
{{- end }}
{{- with .priorityClass }}
ray.io/priority-class-name: {{ . }}
{{- end }}
{{- else if eq .scheduler "yunikorn" }}
ray.io/gang-scheduling-enabled: "true"
yunikorn.apache.org/app-id: {{ include "rayzero.jobname" $ }}-{{ sha256sum $.Release.Namespace | trunc 8 }}
{{- with .queueName }}
yunikorn.apache.org/queue: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.kueue }}
{{- if .queueName }}
kueue.x-k8s.io/queue-name: {{ .queueName }}
{{- end }}
{{- if .priorityClass }}
kueue.x-k8s.io/priority-class: {{ .priorityClass }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Annotations of a RayJob or RayCluster. */}}
{{- define "rayzero.annotations" -}}
{{- $annotations := deepCopy .Values.commonAnnotations -}}
{{- if .Values.kueue.elastic -}}{{- $_ := set $annotations "kueue.x-k8s.io/elastic-job" "true" -}}{{- end -}}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
