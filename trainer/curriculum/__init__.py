"""What a run asks for as it goes on: how many turns rollouts have, and which tasks are drawn."""
