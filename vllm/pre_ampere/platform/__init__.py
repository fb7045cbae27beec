# SPDX-License-Identifier: Apache-2.0
"""The platform classes: one set of hooks, joined to upstream's CUDA or CPU platform."""
