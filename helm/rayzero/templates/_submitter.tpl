{{/* The pod that submits the job. KubeRay makes a Kubernetes Job of it, and gives its container a command. */}}

{{/* The values of its pod: where they have none, it runs on nodes like the head's. */}}
{{- define "rayzero.submitter.values" -}}
{{- $pod := deepCopy .Values.job.submitter -}}
{{- range $key := list "nodeSelector" "tolerations" -}}
{{- $_ := set $pod $key (get $pod $key | default (get $.Values.head $key)) -}}
{{- end -}}
{{- toJson $pod -}}
{{- end -}}

{{- define "rayzero.submitter" -}}
metadata:
  {{- include "rayzero.pod.metadata" . | nindent 2 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "rayzero.worker.account" .root }}
  automountServiceAccountToken: false
  {{- include "rayzero.pod.common" . | nindent 2 }}
  containers:
    - name: ray-job-submitter
      image: {{ include "rayzero.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext:
        {{- include "rayzero.container.security" .root | nindent 8 }}
      resources:
        {{- toYaml .pod.resources | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        - {name: USER, value: rayzero}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
{{- end -}}
