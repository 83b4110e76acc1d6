"""Chat templates in the forms that models have, shortened, and conversations for them."""

from __future__ import annotations

from typing import Any

_TOOLS_AS_JSON = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>\n' }}" + _TOOLS_AS_JSON + "{{- '</tools><|im_end|>\n' }}"
    "{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + "
    "'\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{- call.arguments | tojson }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
OPEN_THOUGHTS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- if tools is not none %}{{- 'Environment: ipython\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls is defined %}{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' }}{{- call.arguments | tojson }}{{- "}" }}<|eot_id|>'
    "{%- elif message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content }}"
    "{%- else %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' or message.role == 'system' %}"
    "{%- if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{{- '[INST] %s[/INST]' % message.content }}"
    "{%- elif message.tool_calls %}[TOOL_CALLS] [{%- for call in message.tool_calls %}"
    "{{- call.function | tojson }}{%- if not loop.last %}, {% endif %}{%- endfor %}]{{- eos_token }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- else %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]{%- endif %}{%- endfor %}"
)
PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LOOPS = (
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{{ sep_token }}|{{ bos_token }}\n{% endfor %}"
)
TEMPLATES = {
    "hermes": HERMES,
    "open thoughts": OPEN_THOUGHTS,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "parts": PARTS,
    "loops": LOOPS,
    "named": {"default": PARTS, "tool_use": HERMES},
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers: é <b>",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hello </s>é "},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "What is 1 + 2?"},
]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]
IN_PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]}
]
