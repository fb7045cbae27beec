# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pre-ampere doctor` finds out: the box, its software, and what would serve a model."""
