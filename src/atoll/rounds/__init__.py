"""Rounds as the manifests in a training's object store have them, read by the control plane."""
