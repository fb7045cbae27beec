# SPDX-License-Identifier: Apache-2.0
"""The gated-delta-net layer of Qwen's hybrids: which kernels it takes and in what order it calls them."""
