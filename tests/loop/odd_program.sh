#!/bin/sh
# An agent in a shell: one call with curl; the policy's words are its output.
task=$(cat)
[ "$task" = "$SPANGRAD_TASK" ] || exit 4
curl --silent --fail "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" \
  -H 'content-type: application/json' \
  -d '{"model": "'"$OPENAI_MODEL"'", "messages": [{"role": "user", "content": "hello"}]}' |
  sed 's/.*"content": *"\([^"]*\)".*/{"said": "\1"}/'
