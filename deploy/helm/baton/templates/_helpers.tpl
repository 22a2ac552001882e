{{- define "baton.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "baton" $name) }}{{ $name = printf "%s-baton" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "baton.scheme" -}}
{{ if .Values.tls.secret }}https{{ else }}http{{ end }}
{{- end }}

{{- /* The groups with a replica, each with the defaults of `worker`. */ -}}
{{- define "baton.groups" -}}
{{- $found := dict -}}
{{- range $name, $group := .Values.groups }}
{{- $merged := mergeOverwrite (deepCopy $.Values.worker) ($group | default dict) }}
{{- if or (gt (int $merged.replicas) 0) $merged.autoscaling.enabled }}{{ $_ := set $found $name $merged }}{{ end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- /* `yes` if KEDA scales a group. */ -}}
{{- define "baton.keda" -}}
{{- range $group := include "baton.groups" . | fromJson }}
{{- if and $group.autoscaling.enabled $group.autoscaling.keda }}yes{{ end }}
{{- end }}
{{- end }}

{{- /* Number of hosts that the server waits for before it is ready. */ -}}
{{- define "baton.hosts" -}}
{{- $hosts := 0 -}}
{{- range $group := include "baton.groups" . | fromJson }}
{{- $hosts = add $hosts (ternary ($group.autoscaling.minReplicas | default 1) $group.replicas $group.autoscaling.enabled | int) }}
{{- end }}
{{- $hosts }}
{{- end }}

{{- /* Grace period of running requests: survival.drain_s of the configuration, or its default. */ -}}
{{- define "baton.drainSeconds" -}}
{{- $line := regexFind `(?m)^[^#\n]*\bdrain_s\s*=\s*[0-9_.]+` .Values.config -}}
{{- if $line }}{{ regexFind `[0-9_.]+$` $line | replace "_" "" }}{{ else }}10{{ end }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.env" -}}
- name: HF_HOME
  value: {{ if .Values.model.claim }}/tmp/hub{{ else }}/models{{ end }}
- name: TRITON_CACHE_DIR
  value: /tmp/triton
{{- if .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.model.tokenSecret | quote }}, key: token}}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
- {name: models, mountPath: /models{{ if .Values.model.claim }}, readOnly: true{{ end }}}
- {name: tmp, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}

{{- define "baton.volumes" -}}
- name: models
  {{- if .Values.model.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- end }}

{{- /* The socket and the secret of the pool of a node. */ -}}
{{- define "baton.kvVolumes" -}}
- name: kv-socket
  hostPath: {path: {{ .Values.nodeKv.folder }}, type: DirectoryOrCreate}
- name: kv-secret
  secret:
    secretName: {{ .Values.keys.secret | quote }}
    defaultMode: 0440
    items: [{key: kv-secret, path: kv-secret}]
{{- end }}

{{- define "baton.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
