"""What an agent is made of: agents, steps, tools and retrievals, by decoration or from LangChain."""
