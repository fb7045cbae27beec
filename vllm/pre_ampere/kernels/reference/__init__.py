# SPDX-License-Identifier: Apache-2.0
"""Each operation in plain PyTorch: the definition that every kernel is measured against.

Inputs are of any floating dtype; the arithmetic is float64; results have the dtype of the input or
of the state. In decoding and verification the state is rounded to its dtype after every token, so a
token's result is the same whether it was computed alone, with the drafts before it, or beside other
requests. Nothing here imports vLLM.

Shapes are written with n requests, H key heads, HV value heads (HV a multiple of H; value head i
reads key head i // (HV // H)), key head dimension K and value head dimension V. A state is
[HV, V, K].

Slot 0 is vLLM's null block and negative slots are padding: their requests are skipped, their states
stay as they are, and their rows of the output are zero.
"""
