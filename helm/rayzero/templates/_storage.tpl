{{/* Where checkpoints lie, for the job file and for the pods that write them. */}}

{{- define "rayzero.storage.path" -}}
{{- with .Values.storage -}}
{{- if .objectStore.url -}}{{ .objectStore.url }}
{{- else if .pvc.enabled -}}{{ .pvc.mountPath }}/runs
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rayzero.storage.mounts" -}}
{{- with .Values.storage -}}
{{- if .pvc.enabled }}
- {name: checkpoints, mountPath: {{ .pvc.mountPath }}}
{{- end }}
{{- if .objectStore.credentialsFile.secretName }}
- {name: credentials, mountPath: /etc/rayzero-credentials, readOnly: true}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "rayzero.storage.volumes" -}}
{{- if .Values.storage.pvc.enabled }}
- name: checkpoints
  persistentVolumeClaim: {claimName: {{ include "rayzero.claim" . }}}
{{- end }}
{{- with .Values.storage.objectStore.credentialsFile.secretName }}
- name: credentials
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "rayzero.storage.env" -}}
{{- with .Values.storage.objectStore }}
{{- range $name, $value := .env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- if .credentialsFile.secretName }}
- {name: GOOGLE_APPLICATION_CREDENTIALS, value: /etc/rayzero-credentials/{{ .credentialsFile.key }}}
{{- end }}
{{- end }}
{{- end -}}
