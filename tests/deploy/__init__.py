"""Chart, manifests and image, tested without a Kubernetes cluster.

Helm itself renders the chart, and every object is validated against the schemas of Kubernetes and
of the custom resource definitions in the folder RAYZERO_CRDS.
"""
