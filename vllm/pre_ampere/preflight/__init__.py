# SPDX-License-Identifier: Apache-2.0
"""What will not launch on a Volta or Turing card, known on any machine before anything is launched.

`run.preflight` starts one process for each card and way of lowering. In it (`compile_for_card`)
Triton and upstream are told that they are on that card (`card`), the launchers that the model uses
are called on tensors of the model's shapes (`launches`), and what Triton compiled is read
(`inspection`). `report` holds the findings, compares them with a recorded result and prints them.
docs/preflight.md is for readers.
"""
