"""Write the demo model in a shape that `mlx_lm.server --pipeline` accepts: `python tests/demo_as_qwen2.py DEMO TO`.

mlx-lm's llama has no pipeline of its own; a qwen2 whose three attention biases are zero computes the same. The weights
go into one file per half of the layers with an index, since mlx-lm's sharded loading reads nothing else.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx


def main(demo: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for file in demo.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, to / file.name)
    config = json.loads((demo / "config.json").read_text())
    width = config["head_dim"]
    layers = config["num_hidden_layers"]
    weights = {name: array for file in demo.glob("*.safetensors") for name, array in mx.load(str(file)).items()}
    for layer in range(layers):
        for projection, heads in (
            ("q", "num_attention_heads"),
            ("k", "num_key_value_heads"),
            ("v", "num_key_value_heads"),
        ):
            bias = mx.zeros((config[heads] * width,), mx.float32)
            weights[f"model.layers.{layer}.self_attn.{projection}_proj.bias"] = bias
    halves = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, array in weights.items():
        late = name.startswith("model.layers.") and int(name.split(".")[2]) >= layers // 2
        halves["model-00002-of-00002.safetensors" if late else "model-00001-of-00002.safetensors"][name] = array
    for file, part in halves.items():
        mx.save_safetensors(str(to / file), part, metadata={"format": "mlx"})
    where = {name: file for file, part in halves.items() for name in part}
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (to / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
