"""Chart, manifests and image: what runs on Kubernetes, tested without a cluster.

The chart is rendered by Helm itself, and every object held against the schemas of Kubernetes and of
the custom resources, which RAYZERO_CRDS names a folder of.
"""
