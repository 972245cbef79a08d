{{/* The groups of a PrometheusRule: files/rules.yaml, with what values say of each alert. */}}

{{- define "rayzero.alerts" -}}
{{- $values := .Values.metrics.prometheusRule -}}
{{- $rules := list -}}
{{- range .Files.Get "files/rules.yaml" | fromYamlArray -}}
{{- $wanted := get $values.alerts .alert | default dict -}}
{{- if $wanted.enabled -}}
{{- $rule := dict "alert" .alert "annotations" (deepCopy .annotations) -}}
{{- $_ := set $rule "expr" (replace "THRESHOLD" (toString $wanted.threshold) .expr) -}}
{{- $_ := set $rule "labels" (mustMergeOverwrite (dict "severity" $wanted.severity) (deepCopy $values.alertLabels) (deepCopy ($wanted.labels | default dict))) -}}
{{- with $wanted.for -}}{{- $_ := set $rule "for" . -}}{{- end -}}
{{- with $values.runbookUrl -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s#%s" . (lower $rule.alert)) -}}
{{- end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- toYaml (list (dict "name" "rayzero" "rules" $rules)) -}}
{{- end -}}
