# SPDX-License-Identifier: Apache-2.0
"""The operations of the gated delta net: what kernels exist, which one a card gets, and why."""
