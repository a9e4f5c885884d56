"""The private names of PyTorch and FlashAttention-4 that ringspan uses, one module for each purpose.

No other package of ringspan uses a private name of either; a test reads all sources and checks it. Functions that run
in every call are bound directly, without a Python function around them. ``tests/torch_private/test_private_names.py``
lists every name with its use.

``dynamo``, ``tensor_version`` and ``flash_attention_4`` do not import PyTorch, since packages that plan without it use
them.
"""
