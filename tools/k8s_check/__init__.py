"""Checks the manifests in ``k8s/`` without a cluster: renders every overlay and says what would fail, or fail silently.

The API server refuses a typo; much worse is what it takes: a port the operator drops, a budget that allows nothing, a
drain that is longer than the grace period. ``shapes`` holds the fields we use, ``pods``, ``kuberay``, ``serving`` and
``objects`` the rules, ``render`` and ``outside`` the tools that may be there or not.
"""
