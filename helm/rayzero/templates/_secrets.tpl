{{/* Values become config maps and pods, which more people may read than secrets: none may hold one. */}}

{{- define "rayzero.check.secrets" -}}
{{- $all := .Values | toJson -}}
{{- $word := "(?i:password|passwd|secret|token|credential|api_?key|access_?key|private_?key|account_?key)" -}}
{{- $fine := "(?i:tokeniz|tokens|(bos|eos|pad|unk|mask|sep|cls)_token|_path$|_file$|name$)" -}}
{{- $job := .Values.job | toJson -}}
{{- range regexFindAll (printf `"[\w.-]*%s[\w.-]*":"[^"]` $word) $job -1 -}}
{{- $key := regexFind `[\w.-]+` . -}}
{{- if not (regexMatch $fine $key) -}}
{{- fail (printf "job: %s would be text in a config map; keep it in a secret, hand it over with head.envFrom and workers.envFrom, and read the environment" $key) -}}
{{- end -}}
{{- end -}}
{{- range regexFindAll (printf `"name":"[^"]*%s[^"]*","value":"[^"]` $word) $all -1 -}}
{{- $name := regexFind `:"[^"]+` . | trimPrefix `:"` -}}
{{- if not (regexMatch $fine $name) -}}
{{- fail (printf "env: %s has a value; give it by valueFrom.secretKeyRef, or by envFrom" $name) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch `://[^/@\s"]+@` $all -}}
{{- fail "a URL in the values holds credentials; they come from a secret (storage.objectStore.secretName)" -}}
{{- end -}}
{{- end -}}
