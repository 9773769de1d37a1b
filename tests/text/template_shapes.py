"""Chat templates written in the style of published families: what they do with roles, tools and reasoning.

None of them is a copy. Each has the constructs by which its family differs from others: how it strips, splits, joins,
loops, refuses, and which control tokens it writes. `published_templates.py` runs the same checks over published ones.
"""

# ruff: noqa: E501 (templates are data)

from __future__ import annotations

_QWEN_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call>\\n{\\"name\\": <name>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
"""
_QWEN_RESULTS = """
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

SHAPES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "qwen2.5": _QWEN_TOOLS
    + """
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
"""
    + _QWEN_CALLS
    + "        {{- '<|im_end|>\\n' }}\n"
    + _QWEN_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "qwen3": _QWEN_TOOLS
    + """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set is_result = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
    {%- if ns.searching and message.role == "user" and message.content is string and not is_result %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
"""
    + _QWEN_CALLS
    + "        {{- '<|im_end|>\\n' }}\n"
    + _QWEN_RESULTS
    + """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "llama3.1": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("No first user message for the tools.") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One call at a time.") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "mistral v1": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant.') }}{% endif %}{% endfor %}""",
    "mistral v3": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("Alternate.") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("Ids have 9 characters.") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Unknown role.") }}{%- endif %}
{%- endfor %}""",
    "mistral v7": """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default = "Today is " + today + "." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content'] %}
    {%- else %}{%- set system_message = messages[0]['content'][0]['text'] %}{%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = default %}{%- set loop_messages = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and images.') }}{%- endif %}
            {%- endfor %}{{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- else %}{{- raise_exception('Only user, system and assistant roles.') }}{%- endif %}
{%- endfor %}""",
    "gemma2": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role.') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "gemma3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Alternate.") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    "phi3": """{% for message in messages %}
{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "phi4": """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
    "command-r tool_use": """{{ bos_token }}
{%- macro kind(schema) %}{%- if schema.type == 'string' %}str{%- elif schema.type == 'array' %}List[{{ kind(schema['items']) }}]
{%- else %}{{ schema.type }}{%- endif %}{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system = 'Be helpful.' %}{%- endif %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' }}{{ '# Preamble\\n' }}{{ system }}{{ '\\n\\n## Tools' }}
{%- for tool in tools or [] %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
{{ '\\n```python\\ndef ' + tool.name + '(' }}
{%- for name, field in tool.parameters.properties.items() %}
    {{- name }}: {% if name not in (tool.parameters.required or []) %}Optional[{{ kind(field) }}] = None{% else %}{{ kind(field) }}{% endif %}
    {%- if not loop.last %}, {% endif %}
{%- endfor %}{{ ') -> List[Dict]:\\n    pass\\n```' }}{%- endfor %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in loop_messages %}
    {%- set content = message['content'] %}
    {%- if message.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if message.tool_calls %}{{ 'Action: ```json\\n[\\n' }}
            {%- for call in message.tool_calls %}{{ '{"tool_name": "' + call.function.name + '", "parameters": ' }}
                {{- call.function.arguments | tojson }}{{ '}' }}{%- if not loop.last %}{{ ',\\n' }}{% endif %}{%- endfor %}{{ '\\n]```' }}
        {%- else %}{{ content.strip() }}{%- endif %}{{ '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'tool' %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' + content + '</results><|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    "command-r rag": """{{ bos_token }}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Answer from the documents.<|END_OF_TURN_TOKEN|>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}{%- endfor %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>' }}
{%- for document in documents or [] %}{{ '\\nDocument: ' }}{{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{ value }}
{% endfor %}{%- endfor %}{{ '</results><|END_OF_TURN_TOKEN|>' }}
{%- if citation_mode == 'fast' %}{{ 'Cite.' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    "deepseek v2": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}
{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    "deepseek v3 and r1": """{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- set ns.is_tool = false -%}{%- set ns.is_first = true %}
        {%- for call in message['tool_calls'] %}
            {%- if ns.is_first %}{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{%- set ns.is_first = false %}{%- else %}{{'\\n'}}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] | tojson + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}
    {%- elif message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.is_tool %}{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}
        {%- else %}{% set content = message['content'] %}
            {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
            {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true -%}
        {%- if ns.is_output_first %}{{'<｜tool▁outputs▁begin｜>'}}{%- set ns.is_output_first = false %}{%- endif %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""",
    "glm4": """[gMASK]<sop>
{%- if tools is defined and tools %}
<|system|>
Use the tools:{% for tool in tools %}

## {{ tool.function.name }}

{{ tool.function | tojson(indent=4) }}
{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
<|system|>
{{ message.content }}
{%- elif message.role == 'user' %}
<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}
<|assistant|>
{%- if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}
{%- else %}
{{ message.content }}
{%- endif %}
{%- elif message.role == 'tool' %}
<|observation|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif %}""",
    "granite3": """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Today's date: " + strftime_now('%B %d, %Y') + "." %}
{%- if tools and documents %}{%- set system_message = system_message + " Tools and documents." %}
{%- elif tools %}{%- set system_message = system_message + " Tools." %}{%- elif thinking %}{%- set system_message = system_message + " Think." %}{%- endif %}
{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{- tools | map(attribute='function') | list | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}{%- endif %}
{%- if documents %}{%- for document in documents %}{{- '<|start_of_role|>document {"document_id": "' + document['doc_id'] | string + '"}<|end_of_role|>\\n' }}
{{- document['text'] }}{{- '<|end_of_text|>\\n' }}{%- endfor %}{%- endif %}
{%- for message in loop_messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
{%- if message.tool_calls %}{{- '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson }}{%- endif %}{{- '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}""",
    "olmo2": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}
{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    "smollm3": """{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set mode = "/think" if enable_thinking else "/no_think" %}
{%- set custom = messages[0].content if messages[0].role == "system" else "" %}
{%- if "/no_think" in custom %}{%- set mode = "/no_think" %}{%- set custom = custom.replace("/no_think", "").rstrip() %}
{%- elif "/think" in custom %}{%- set mode = "/think" %}{%- set custom = custom.replace("/think", "").rstrip() %}{%- endif %}
{{- "<|im_start|>system\\nMode: " + mode + "\\n" + custom }}
{%- if xml_tools or tools %}{%- set ns = namespace(text="<tools>\\n") %}
{%- for tool in tools or xml_tools %}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" %}{%- endfor %}{{- ns.text + "</tools>" }}{%- endif %}
{{- "<|im_end|>\\n" }}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}{%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}""",
    "hermes": """{%- macro type_of(param) -%}
{%- if param.type == "array" -%}list{%- if param['items'] is defined -%}[{{ type_of(param['items']) }}]{%- endif -%}
{%- elif param.enum is defined -%}{{ param.enum | join(" | ") }}
{%- elif param.type is iterable and param.type is not string -%}{{ param.type | map('lower') | join('|') }}
{%- else -%}{{ param.type | default('any') }}{%- endif -%}{%- endmacro -%}
{{ bos_token }}{{ '<|im_start|>system\\nTools: <tools> ' }}
{%- for tool in tools or [] %}{%- set tool = tool.function %}{{- tool.name + '(' }}
{%- for name, field in (tool.parameters.properties or {}).items() -%}{{ name + ': ' + type_of(field) }}{%- if not loop.last %}, {% endif %}{%- endfor -%}
{{- ')' }}{%- if tool.description %}{{- ' - ' + tool.description }}{%- endif %}{{ '\\n' }}{%- endfor %}{{ '</tools><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == "user" or message.role == "system" or (message.role == "assistant" and message.tool_calls is not defined) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role }}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}{%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
{{- '<tool_response>\\n' }}{{- message.content }}{%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}
{%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|im_end|>' }}{%- elif loop.last %}{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "functionary": """{%- macro field(name, schema, indent) %}{{ indent ~ "// " ~ (schema.description | default("")) ~ "\\n" ~ indent ~ name ~ ": " }}
{%- if schema.enum is defined %}{{ schema.enum | map('tojson') | join(" | ") }}{%- elif schema.type == "object" %}{{ "{\\n" }}
{%- for key, value in schema.properties | dictsort %}{{ field(key, value, indent ~ "  ") }}{%- endfor %}{{ indent ~ "}" }}
{%- else %}{{ schema.type | default("any") | replace("integer", "number") }}{%- endif %}{{ ",\\n" }}{%- endmacro %}
{{ bos_token }}{{ "<|start_header_id|>system<|end_header_id|>\\n\\nnamespace functions {\\n" }}
{%- for tool in tools or [] %}{{ "type " ~ tool.function.name ~ " = (_: {\\n" }}{%- for key, value in (tool.function.parameters.properties or {}) | dictsort %}{{ field(key, value, "") }}{%- endfor %}{{ "}) => any;\\n" }}{%- endfor %}{{ "}<|eot_id|>" }}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}
{%- elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- if message['content'] %}{{ '>>>all\\n' + message['content'] }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '>>>' + call['function']['name'] + '\\n' + (call['function']['arguments'] | tojson) }}{%- endfor %}{{ '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n>>>' }}{% endif %}""",
    "firefunction": """{%- set loop_messages = messages -%}{%- set ns = namespace(shown=false, functions=functions | default(tools | default([]) | tojson(indent=4))) -%}
{%- for message in loop_messages -%}{%- set role = message['role'] | lower -%}
{%- if role not in ['user', 'assistant', 'system', 'tool'] -%}{{ raise_exception('Invalid role ' + message['role']) }}{%- endif -%}
{%- if loop.first -%}{{ bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions: ' + ns.functions + '<|eot_id|>' }}{%- endif -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message['content'] or '') | trim }}
{%- if 'tool_calls' in message -%}{{ 'functools' }}[{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %}]{%- endif -%}
{{ '<|eot_id|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}""",
    "internlm": """{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "yi": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}{% if system_message is defined %}{{ system_message }}{% endif %}
{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n<|im_start|>assistant\\n' }}
{% elif message['role'] == 'assistant' %}{{ content + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}""",
    "starcoder": """{{bos_token}}{{'You write code.\\n\\n'}}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ raise_exception('No system role.') }}
{%- elif message['role'] == 'user' %}{{'### Instruction\\n' + message['content'] + '\\n\\n'}}
{%- else %}{{'### Response\\n' + message['content'] + eos_token + '\\n\\n'}}{%- endif %}
{%- endfor %}{{'### Response\\n'}}""",
    "falcon": """{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{% if message['role'] == 'system' %}{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}
{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}{{ message['content'] | replace('\\r\\n', '\\n') | replace('\\n\\n', '\\n') | trim }}{% endfor %}
{% if add_generation_prompt %}{{ '\\nFalcon:' }}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "harmony": """{%- macro kind_of(spec) -%}{%- if spec.type == 'array' -%}{{ kind_of(spec['items']) ~ '[]' }}
{%- elif spec.enum is defined -%}{{ '"' ~ spec.enum | join('" | "') ~ '"' }}{%- else -%}{{ spec.type or 'any' }}{%- endif -%}{%- endmacro -%}
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '\\nReasoning: ' + reasoning_effort | default('medium') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>namespace functions {\\n' }}{%- for tool in tools %}{%- set tool = tool.function %}
{{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (_: {' }}{%- for name, spec in tool.parameters.properties.items() %}{{- name + ': ' + kind_of(spec) + ',' }}{%- endfor %}{{- '}) => any;\\n' }}{%- endfor %}{{- '}<|end|>' }}{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if '<|channel|>analysis<|message|>' in message.content or '<|channel|>final<|message|>' in message.content %}{{- raise_exception('Channels belong in other fields.') }}{%- endif -%}
        {%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}{%- set last_tool_call.name = call.name %}
        {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- set last_tool_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception('A result without a call.') }}{%- endif %}
        {{- '<|start|>functions.' + last_tool_call.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
}
