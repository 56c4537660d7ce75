{{/* Name of all objects of a release, which may have dots. */}}
{{- define "mooncake.name" -}}
{{- if contains "mooncake" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" | trimSuffix "." }}
{{- else }}{{ printf "%s-mooncake" .Release.Name | trunc 50 | trimSuffix "-" | trimSuffix "." }}
{{- end }}
{{- end }}

{{- define "mooncake.operatorName" -}}
{{ include "mooncake.name" . }}-operator
{{- end }}

{{/* A Service's name has no dots. Here and below: 63 characters at most, and the names above stay as they are, for
     Deployment and Lease go by them. */}}
{{- define "mooncake.metricsName" -}}
{{ include "mooncake.operatorName" . | replace "." "-" | trunc 55 }}-metrics
{{- end }}

{{/* A Job's name is also a label. */}}
{{- define "mooncake.leaveName" -}}
{{ include "mooncake.operatorName" . | trunc 57 }}-leave
{{- end }}

{{- define "mooncake.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "mooncake.operatorName" .) }}
{{- else }}{{ required "serviceAccount.name: write the name of the service account, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* What a Deployment selects by; never changes. NetworkPolicies of clusters let in by the first and the third. */}}
{{- define "mooncake.selector" -}}
app.kubernetes.io/name: mooncake
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "mooncake.labels" -}}
{{ include "mooncake.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "mooncake.operatorImage" -}}
{{ .Values.operator.image.repository }}:{{ .Values.operator.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Settings of the operator: operator/mooncake_operator/settings.py. */}}
{{- define "mooncake.environment" -}}
- name: MOONCAKE_OPERATOR_IMAGE
  value: {{ .Values.images.mooncake | default (printf "mooncake-k8s:%s" .Chart.AppVersion) | quote }}
- name: MOONCAKE_OPERATOR_REDIS_IMAGE
  value: {{ .Values.images.redis | quote }}
- name: MOONCAKE_OPERATOR_REDIS_USER
  value: {{ with .Values.images.redisUser }}{{ int64 . | quote }}{{ else }}""{{ end }}
- name: MOONCAKE_OPERATOR_LEASE_NAME
  value: {{ include "mooncake.operatorName" . }}
- name: MOONCAKE_OPERATOR_LEASE_NAMESPACE
  value: {{ .Release.Namespace }}
- name: MOONCAKE_OPERATOR_WORKERS
  value: {{ .Values.operator.workers | quote }}
- name: MOONCAKE_OPERATOR_RESYNC_SECONDS
  value: {{ .Values.operator.resyncSeconds | quote }}
- name: MOONCAKE_OPERATOR_LOG_LEVEL
  value: {{ .Values.operator.logLevel }}
{{- with .Values.operator.watchNamespaces }}
- name: MOONCAKE_OPERATOR_NAMESPACES
  value: {{ join "," . | quote }}
# It may not list what lies outside of them.
- name: MOONCAKE_OPERATOR_SCAN
  value: "false"
{{- end }}
{{- end }}

{{/* What the operator may do in a namespace that it looks after. */}}
{{- define "mooncake.rules" -}}
- apiGroups: [mooncake.io]
  resources: [mooncakeclusters]
  verbs: [get, list, watch]
- apiGroups: [mooncake.io]
  resources: [mooncakeprefillpools, mooncakedecodepools, mooncakekvcachepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [mooncake.io]
  resources:
  - mooncakeclusters/status
  - mooncakeprefillpools/status
  - mooncakedecodepools/status
  - mooncakekvcachepools/status
  verbs: [patch]
# Only asked for where the admission plugin OwnerReferencesPermissionEnforcement is on (OpenShift): owner
# references block their owner's deletion until the garbage collector has seen them.
- apiGroups: [mooncake.io]
  resources:
  - mooncakeclusters/finalizers
  - mooncakeprefillpools/finalizers
  - mooncakedecodepools/finalizers
  - mooncakekvcachepools/finalizers
  verbs: [update]
# Pods are created and deleted, never applied: no patch. Only the readiness gate is written to them.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, configmaps, secrets]
  verbs: [get, list, watch, create, patch, delete]
# A cluster always has its schedulers: their Deployment goes with its owner.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
# What a revision holds never changes.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Told to users; and read of Pods that do not start, for only Events say why a volume cannot be mounted.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, list]
{{- end }}

{{/* What it takes to let a pool go that would keep a namespace from ending. */}}
{{- define "mooncake.finalizerRules" -}}
- apiGroups: [mooncake.io]
  resources: [mooncakeprefillpools, mooncakedecodepools]
  verbs: [get, list, patch]
{{- end }}

{{/* Whether a namespace is on its way out. */}}
{{- define "mooncake.namespaceRule" -}}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
{{- end }}
