"""The multi-step distillation of Algorithm 4: BERT → M1 → M2 → M3 → Sorbet."""
