# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: `vllm.pre_ampere` comes from the tree that COUNTER_CHECK_TREE names."""

import os

import vllm

vllm.__path__.insert(0, os.path.join(os.environ["COUNTER_CHECK_TREE"], "vllm"))
