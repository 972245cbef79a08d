{{/* The job file, with what follows from other values, as JSON: numbers keep their form in it, and
     every JSON file is a YAML file. */}}

{{- define "rayzero.metrics.port" -}}
{{- $metrics := .Values.job.spec.metrics | default dict -}}
{{- $metrics.port | default .Values.metrics.port | int -}}
{{- end -}}

{{/* The ports of jobs' endpoints, as a JSON list of {name, port}: in a cluster that stays, several. */}}
{{- define "rayzero.metrics.ports" -}}
{{- $first := include "rayzero.metrics.port" . | int -}}
{{- $ports := list -}}
{{- range $index := until (ternary (int .Values.metrics.ports) 1 (eq .Values.mode "cluster")) -}}
{{- $name := ternary "rayzero-metrics" (printf "rayzero-%d" $index) (eq $index 0) -}}
{{- $ports = append $ports (dict "name" $name "port" (add $first $index)) -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{- define "rayzero.job" -}}
{{- $job := deepCopy .Values.job.spec -}}
{{- if $job.launch -}}{{/* instead of the example's function; a script has its own steps and config */}}
{{- $job = omit $job "entrypoint" "args" "steps" -}}
{{- else if not $job.engine -}}{{- $_ := set $job "engine" "engine.json" -}}{{- end -}}
{{- $path := include "rayzero.storage.path" . -}}
{{- if and $path (not (dig "checkpoint" "path" "" $job)) -}}
{{- $_ := set $job "checkpoint" (merge (dict "path" $path) ($job.checkpoint | default dict)) -}}
{{- end -}}
{{- if .Values.metrics.enabled -}}
{{- $port := include "rayzero.metrics.port" . | int -}}
{{- $_ := set $job "metrics" (merge (dict "port" $port "host" "0.0.0.0") ($job.metrics | default dict)) -}}
{{- end -}}
{{- mustToPrettyJson $job -}}
{{- end -}}
