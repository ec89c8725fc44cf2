"""A conversation with a model, in the terminal.

    python examples/llm/chat.py path/to/hf_folder
    python examples/llm/chat.py runs/sft --system "Answer in one sentence." --temperature 0

The tokenizer's chat template is used; a model without one gets "User:" and "Assistant:". What was said is read once and
kept. When the conversation outgrows the cache, the oldest tokens but the first few are forgotten
(--eviction-policy attention_sinks, the default here), and a line says so. Ctrl-C ends an answer, not the chat.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.collections.llm.generation.options import (
    add_generation_options,
    parse_spelled,
    read_generation_options,
    read_stop_tokens,
)
from nemo_like.core.errors import ConfigError
from nemo_like.core.script import run_script

if TYPE_CHECKING:
    from nemo_like.collections.llm.generation import Session
    from nemo_like.collections.llm.generation.conversation import Conversation

COMMANDS = (
    "/reset starts anew, /save FILE writes the conversation, /exit leaves; Ctrl-C ends an answer"
)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("--system", help="what stands before the conversation")
    add(
        "--template",
        help="plain, chatml, or a Jinja file; default: the tokenizer's own, else plain",
    )
    add("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    add_generation_options(
        parser, temperature=0.7, top_p=0.9, max_tokens=512, eviction_policy="attention_sinks"
    )
    return parse_spelled(parser, argv)


def answer(session: "Session", conversation: "Conversation") -> None:
    """Says the next turn, which Ctrl-C may end."""
    prompt = conversation.encode()
    size = session.cache.cache_size
    had = len(session.tokens)
    said: list[str] = []
    pieces = session.stream(prompt)
    try:
        for piece in pieces:
            # The space behind a plain "Assistant:" belongs to the answer's first token.
            piece = piece if said else piece.lstrip()
            if piece:
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [ended]")
    finally:
        pieces.close()
    sys.stdout.write("\n")
    conversation.say("assistant", "".join(said).rstrip())
    if had <= size < len(session.tokens):
        policy = session.config.eviction_policy
        sys.stderr.write(
            f"[more than {size} tokens: {policy} forgets the oldest; /reset starts anew]\n"
        )


def obey(command: str, session: "Session", conversation: "Conversation") -> bool:
    """Does what a line with a slash says; false ends the chat."""
    name, _, rest = command.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset()
        sys.stderr.write("[a new conversation]\n")
    elif name == "/save":
        file = Path(rest.strip() or "chat.json")
        try:
            text = json.dumps({"messages": conversation.messages}, ensure_ascii=False, indent=1)
            file.write_text(text + "\n", encoding="utf-8")
            sys.stderr.write(f"[{len(conversation.messages)} messages in {file}]\n")
        except OSError as error:
            sys.stderr.write(f"[not saved: {error}]\n")
    else:
        sys.stderr.write(f"[{name} is no command; {COMMANDS}]\n")
    return True


def read_line() -> str | None:
    """The next line of the user; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            sys.stderr.write("\n[/exit or Ctrl-D leaves]\n")


def chat(arguments: argparse.Namespace) -> None:
    """Loads, and talks until the user leaves."""
    import torch

    from nemo_like.collections.llm.decoder import DecoderModel
    from nemo_like.collections.llm.generation import Session
    from nemo_like.collections.llm.generation.conversation import Conversation
    from nemo_like.collections.llm.generation.layout import lay_out_for_decoding

    read_generation_options(arguments)  # faults first, before a large model is loaded
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = DecoderModel.load(arguments.model).to(device)
    assert model.tokenizer is not None, "load() brings it"
    lay_out_for_decoding(model.network)
    conversation = Conversation(
        model.tokenizer, template=arguments.template, system=arguments.system
    )
    ends = [*read_stop_tokens(arguments.model), *conversation.end_tokens]
    arguments.stop += conversation.stop
    session = Session(
        model.network, model.tokenizer, read_generation_options(arguments, stop_tokens=ends)
    )
    sys.stderr.write(
        f"[{arguments.model}, template: {conversation.template_name}, "
        f"{session.cache.cache_size} tokens are remembered]\n[{COMMANDS}]\n"
    )
    while (line := read_line()) is not None:
        if line.startswith("/"):
            if not obey(line, session, conversation):
                break
        elif line:
            conversation.say("user", line)
            try:
                answer(session, conversation)
            except ConfigError as error:
                conversation.messages.pop()
                sys.stderr.writelines(f"[{fault}]\n" for fault in error.faults)


def main() -> None:
    """The command."""
    run_script(lambda argv: chat(parse_arguments(argv)))


if __name__ == "__main__":
    main()
