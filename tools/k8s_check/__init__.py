"""Checks the manifests in ``k8s/`` without a cluster: renders every overlay and says what would fail, or fail silently.

The API server refuses a typo; much worse is what it takes: a port the operator drops, a budget that allows nothing, a
drain that is longer than the grace period. ``fields`` knows which fields there are, ``*shapes`` the types of those that
rules look at. Rules for the RayService: ``pods``, ``sizes``, ``kuberay``, ``refusals``, ``serving`` (``room``,
``serve_rules``); for what lies beside it: ``objects`` (``exposed``, ``policies``, ``monitoring``, ``routes``,
``redis``, ``credentials``, ``model_cache``), and ``patches``. ``render`` and ``outside`` are the tools that may be
there or not. What somebody else may do is left alone: tests/k8s/test_accepted.py.
"""
