{{/* The job file, with what follows from other values, as JSON: numbers keep their form in it, and
     every JSON file is a YAML file. */}}

{{- define "rayzero.metrics.port" -}}
{{- $metrics := .Values.job.spec.metrics | default dict -}}
{{- $metrics.port | default .Values.metrics.port | int -}}
{{- end -}}

{{- define "rayzero.job" -}}
{{- $job := deepCopy .Values.job.spec -}}
{{- if not $job.engine -}}{{- $_ := set $job "engine" "engine.json" -}}{{- end -}}
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
