{{/* Values become config maps and pods, which more people may read than secrets: none may hold one. */}}

{{- define "rayzero.check.secrets" -}}
{{- range $name, $value := .Values -}}
{{- include "rayzero.check.secret" (dict "path" $name "key" $name "value" $value "kept" (ne $name "job")) -}}
{{- end -}}
{{- range $name, $value := .Values.storage.objectStore.env -}}
{{- include "rayzero.check.secret" (dict "path" (printf "storage.objectStore.env.%s" $name) "key" $name "value" $value) -}}
{{- end -}}
{{- end -}}

{{/* At any depth: (dict "path" "key" "value" "kept"). With `kept` only names of environment variables and
     credentials in URLs tell a secret; of the job, any key may. */}}
{{- define "rayzero.check.secret" -}}
{{- $path := .path -}}
{{- $kept := .kept -}}
{{- if kindIs "map" .value -}}
{{- $entry := and (kindIs "string" .value.name) (kindIs "string" .value.value) -}}
{{- range $key, $value := .value -}}
{{- $named := and $entry (eq $key "value") -}}
{{- $by := ternary $.value.name $key $named -}}
{{- include "rayzero.check.secret" (dict "path" (printf "%s.%s" $path $key) "key" $by "value" $value "kept" (and $kept (not $named))) -}}
{{- end -}}
{{- else if kindIs "slice" .value -}}
{{- range $index, $value := .value -}}
{{- include "rayzero.check.secret" (dict "path" (printf "%s[%d]" $path $index) "key" "" "value" $value "kept" $kept) -}}
{{- end -}}
{{- else if and (kindIs "string" .value) .value -}}
{{- if regexMatch `://[^/@\s]+@` .value -}}
{{- fail (printf "%s: the URL holds credentials, which would be text in pods or config maps; keep them in a secret and name it in storage.objectStore.secretName, or in head.envFrom and workers.envFrom" $path) -}}
{{- end -}}
{{- $word := "(?i:password|passwd|secret|token|credential|api_?key|access_?key|private_?key|account_?key)" -}}
{{- $fine := "(?i:tokeniz|tokens|(bos|eos|pad|unk|mask|sep|cls)_token|_path$|_file$|name$)" -}}
{{- if and (not $kept) (regexMatch $word .key) (not (regexMatch $fine .key)) -}}
{{- fail (printf "%s: %s would be text in pods or config maps; keep it in a secret, hand it over by head.envFrom and workers.envFrom (valueFrom.secretKeyRef for one variable, storage.objectStore.secretName for a bucket), and read the environment" $path .key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
