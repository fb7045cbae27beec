# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, and what makes Triton fast on Turing."""
