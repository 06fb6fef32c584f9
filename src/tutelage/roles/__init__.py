"""A role is an engine plus its own mathematics: actor, critic, reference, reward, and a plain learner."""
