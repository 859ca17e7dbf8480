"""Memory plans for a Trainer: budgets, profiles of its steps, plans on its replicas."""
