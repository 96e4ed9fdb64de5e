"""simonw's llm: a model of extra-openai-models.yaml, from Python and from its command."""

import os
import pathlib
import subprocess
import sys
import tempfile

home = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
from common import BASE_URL, CITY, MODEL, PROMPT, check_city, check_stream, run  # noqa: E402

(home / "extra-openai-models.yaml").write_text(
    f"- model_id: served\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
import json  # noqa: E402

import llm  # noqa: E402

model = llm.get_model("served")
model.key = "none"
options = {"temperature": 0, "max_tokens": 60}


def plain():
    text = model.prompt(PROMPT, stream=False, **options).text()
    assert text
    command = [sys.executable, "-m", "llm", "-m", "served", "--key", "none", "--no-stream",
               "-o", "temperature", "0", "-o", "max_tokens", "60", PROMPT]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.stdout.strip() == text.strip(), said


def streamed():
    text = model.prompt(PROMPT, stream=False, **options).text()
    check_stream(list(model.prompt(PROMPT, stream=True, **options)), text)


def tool():
    """llm asks with the choice auto; a model of code may answer without a call."""

    def get_weather(city: str) -> str:
        """The weather."""
        return "rain"

    assert model.chain(PROMPT, tools=[get_weather], options=options).text() is not None


def schema():
    text = model.prompt(PROMPT, schema=CITY, stream=False, temperature=0, max_tokens=200).text()
    check_city(json.loads(text))


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
