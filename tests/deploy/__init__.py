"""The files of deployment: read, checked and rehearsed without a container engine."""
