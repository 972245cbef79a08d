{{/* What objects are called, and the labels by which they find each other. */}}

{{- define "rayzero.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "rayzero.jobname" -}}
{{- $name := include "rayzero.fullname" . | trunc (int (ternary 40 (sub 39 (len .Values.job.suffix)) (empty .Values.job.suffix))) -}}
{{- trimSuffix "-" $name -}}{{- with .Values.job.suffix }}-{{ . }}{{ end -}}
{{- end -}}

{{- define "rayzero.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rayzero.head.account" -}}
{{- default (ternary (include "rayzero.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Of every pod but the head: the same identity, unless the chart names the accounts itself. */}}
{{- define "rayzero.worker.account" -}}
{{- with .Values.serviceAccount -}}
{{- coalesce .workerName .name (ternary (printf "%s-workers" (include "rayzero.fullname" $)) "default" .create) -}}
{{- end -}}
{{- end -}}

{{- define "rayzero.controller.account" -}}{{- include "rayzero.worker.account" . -}}{{- end -}}

{{- define "rayzero.claim" -}}
{{- default (printf "%s-checkpoints" (include "rayzero.fullname" .)) .Values.storage.pvc.existingClaim -}}
{{- end -}}

{{/* Whether the head keeps its state in files: "true" or empty. */}}
{{- define "rayzero.gcs.files" -}}
{{- with .Values.gcsFaultTolerance -}}{{- if and .enabled (eq .backend "rocksdb") -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- define "rayzero.gcs.claim" -}}
{{- default (printf "%s-gcs" (include "rayzero.fullname" .)) .Values.gcsFaultTolerance.storage.existingClaim -}}
{{- end -}}

{{/* KubeRay sets app.kubernetes.io/name of pods itself, so it is in no selector. */}}
{{- define "rayzero.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: {{ default .Chart.Name .Values.nameOverride }}
{{- end -}}

{{- define "rayzero.labels" -}}
{{ include "rayzero.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: (list root name-suffix) */}}
{{- define "rayzero.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "rayzero.fullname" $root }}{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "rayzero.labels" $root | nindent 2 }}
{{- with $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
