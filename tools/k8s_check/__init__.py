"""Checks the manifests in ``k8s/`` without a cluster: renders every overlay and says what would fail, or fail silently.

The API server refuses a typo; much worse is what it takes: a port the operator drops, a budget that allows nothing, a
drain that is longer than the grace period. ``fields`` knows which fields there are, ``*shapes`` the types of those that
rules look at; ``pods``, ``sizes``, ``kuberay`` and ``serving`` (``room``, ``serve_rules``) are the rules for the RayService,
``objects`` (``policies``, ``monitoring``, ``routes``, ``redis``, ``model_cache``) those for what lies beside it, ``render`` and
``outside`` the tools that may be there or not. What belongs to somebody else is left alone: tests/k8s/test_accepted.py.
"""
