"""Check and rehearse the files of deployment without a container engine."""
