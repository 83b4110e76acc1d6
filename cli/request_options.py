"""The options of `slipstream generate` that become a request: each is a parameter of its command, with its help."""

from typing import Annotated

import typer

Chat = Annotated[bool, typer.Option("--chat", help="PROMPT is what a user says: apply the model's chat template.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens to generate at most.  [default: the server's]")
]
MinNewTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens before which nothing else ends the output.")
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="0 takes the likeliest token; above, tokens are sampled.")
]
Seed = Annotated[int | None, typer.Option(metavar="S", help="The same seed gives the same tokens.  [default: drawn]")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens that sum to P.")]
MinP = Annotated[float | None, typer.Option(metavar="P", help="Sample from tokens P times as likely as the likeliest.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="P", help="Above 1, tokens that are there already become less likely.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(metavar="P", help="Less likely by this for each time that the output has a token.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(metavar="P", help="Less likely by this, once, if the output has a token.")
]
Samples = Annotated[
    int | None, typer.Option("--n", metavar="N", help="Outputs for the prompt, each with a seed of its own.")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the output; may be repeated.")]
StopTokenId = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="A token that ends the output; may be repeated.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end of sequence.")]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Use no drafts.")]
Logprobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --json: each token's log-probability, and those of the N likeliest."),
]
