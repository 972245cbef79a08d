{{/* What every pod and container of the chart may do: as little as Ray can live with. */}}

{{- define "rayzero.pod.security" -}}
{{- $security := .Values.security -}}
runAsNonRoot: true
{{- if not (kindIs "invalid" $security.runAsUser) }}
runAsUser: {{ int64 $security.runAsUser }}
{{- end }}
{{- if not (kindIs "invalid" $security.runAsGroup) }}
runAsGroup: {{ int64 $security.runAsGroup }}
{{- end }}
{{- if not (kindIs "invalid" $security.fsGroup) }}
fsGroup: {{ int64 $security.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "rayzero.container.security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}
