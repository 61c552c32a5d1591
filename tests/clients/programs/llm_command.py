"""The `llm` command, which reads its models from a file."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

base_url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f'- model_id: fox\n  model_name: {model}\n  api_base: "{base_url}/v1"\n'
    )
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    program = str(Path(sys.executable).with_name("llm"))
    command = [program, "-m", "fox", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    outputs = [
        subprocess.run(
            [*command, *extra, "Name a colour."], env=environment, capture_output=True, text=True, check=True
        )
        for extra in ([], ["--no-stream"])
    ]
assert outputs[0].stdout == outputs[1].stdout
assert outputs[0].stdout.strip()
print("ok")
