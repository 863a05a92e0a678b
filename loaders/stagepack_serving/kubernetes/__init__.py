"""A bundle as a deployment on Kubernetes: a group of pods, of which one has the server. Writes files only; needs no cluster."""
