# SPDX-License-Identifier: Apache-2.0
"""Makes engine configurations in a process of its own, as `vllm serve` does before it starts.

Reads cases from standard input, one JSON object with `environment` and `arguments` (EngineArgs), and
prints one JSON line a case: the error, or what the configuration holds. A process of its own because
the platform is chosen once a process, by the environment.
"""

import json
import os
import sys
from typing import Any


def configure(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    saved = dict(os.environ)
    os.environ.update(case["environment"])
    try:
        config = EngineArgs(**case["arguments"]).create_engine_config()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        changed = {k: v for k, v in os.environ.items() if saved.get(k) != v}
        os.environ.clear()
        os.environ.update(saved)
    models = {"model": config.model_config}
    if config.speculative_config is not None:
        models["draft"] = config.speculative_config.draft_model_config
    return {
        "uses_mrope": {name: model.uses_mrope for name, model in models.items()},
        "platform": type(current_platform).__name__,
        "dtype": str(config.model_config.dtype),
        "capability": list(current_platform.get_device_capability() or ()),
        "sliding_window": config.model_config.get_sliding_window(),
        "cache_sliding_window": config.cache_config.sliding_window,
        "disable_sliding_window": config.model_config.disable_sliding_window,
        "attention": repr(config.attention_config),
        "mamba_ssm_cache_dtype": config.cache_config.mamba_ssm_cache_dtype,
        "set_variables": sorted(name for name in changed if name.startswith("VLLM_")),
    }


def main() -> None:
    for line in sys.stdin:
        print("RESULT " + json.dumps(configure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
